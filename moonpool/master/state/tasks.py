"""Tasks that clients start: copies, moves and drains, in steps, with a few objects under way at a time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moonpool.base.errors import InvalidInput, NoSpace, NotFound
from moonpool.master.rules import PoolRules
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.orders import Copies
from moonpool.master.state.records import Draining
from moonpool.master.state.segments import MountedSegment, SegmentTable
from moonpool.master.state.space import PoolSpace
from moonpool.master.state.table import Flag, Replica
from moonpool.store.messages import Refusal, TaskInfo, Tier

_MAX_FINISHED = 1000
# A drain fails that moves nothing for this long and for put_discard_s, when puts of dead writers are discarded.
_STUCK_S = 30.0
_SCAN_SLOTS = 65_536


class Task:
    __slots__ = (
        "changed_s",
        "in_flight",
        "kind",
        "message",
        "nbytes_moved",
        "num_done",
        "num_total",
        "number",
        "segment",
        "started_s",
        "state",
        "task_id",
    )

    def __init__(self, task_id: int, kind: str, num_total: int, segment: str, now_s: float, number: int = 0) -> None:
        self.task_id = task_id
        self.kind = kind
        self.state = "running"
        self.message = ""
        self.num_done = 0
        self.num_total = num_total
        self.nbytes_moved = 0
        self.in_flight = 0
        self.segment = segment
        self.number = number  # of the segment that is drained
        self.started_s = self.changed_s = now_s

    def info(self, now_s: float) -> TaskInfo:
        progress = (self.num_done, self.num_total, self.nbytes_moved)
        ages = (now_s - self.started_s, now_s - self.changed_s)
        return TaskInfo(self.task_id, self.kind, self.state, self.message, *progress, self.segment, *ages)

    def advance(self, nbytes: int, now_s: float) -> None:
        """Count one object that is done."""
        self.num_done += 1
        self.nbytes_moved += nbytes
        self.changed_s = now_s

    def end(self, state: str, now_s: float, message: str = "") -> None:
        if self.state == "running":
            self.state, self.message, self.changed_s = state, message, now_s


class _Drain:
    """The progress of the scan for objects of a segment."""

    __slots__ = ("cursor", "moved_s", "task")

    def __init__(self, task: Task, now_s: float) -> None:
        self.task = task
        self.cursor = 0
        self.moved_s = now_s


class Tasks:
    def __init__(
        self,
        rules: PoolRules,
        first_id: int,
        index: ObjectIndex,
        segments: SegmentTable,
        space: PoolSpace,
        copies: Copies,
    ) -> None:
        self._rules = rules
        self._space = space
        self._index = index
        self._segments = segments
        self._copies = copies
        self._next_id = first_id
        self._tasks: dict[int, Task] = {}
        self._drains: dict[int, _Drain] = {}  # by segment number

    def query(self, task_id: int, now_s: float) -> TaskInfo | None:
        task = self._tasks.get(task_id)
        return None if task is None else task.info(now_s)

    def listed(self, finished: bool, now_s: float) -> list[TaskInfo]:
        """Return the running tasks, the oldest first; with `finished` also the latest finished ones."""
        return [task.info(now_s) for task in self._tasks.values() if finished or task.state == "running"]

    def cancel(self, task_id: int, now_s: float) -> bool:
        """Cancel a task. Copies under way still end; a drained segment takes new objects again. Return False if the
        task was not running.
        """
        task = self._tasks.get(task_id)
        if task is None or task.state != "running":
            return False
        if task.number:
            self._set_draining(task.number, False)
            self._drains.pop(task.number, None)
        task.end("cancelled", now_s, "cancelled by a caller")
        return True

    def copy(self, key: bytes, targets: Sequence[str], now_s: float, missing_only: bool = False) -> int:
        """Start to copy the object to each target; with `missing_only`, to those that have no replica of it. Return the
        task's id.

        Raise NotFound, InvalidInput (a target has a replica already or is not mounted) or NoSpace.
        """
        slot = self._slot(key, now_s)
        held = {each.segment for each in self._index.placements(slot)}
        if not targets:
            raise InvalidInput("a copy has at least one target", param="targets")
        if missing_only:
            targets = [name for name in targets if name not in held]
        for name in targets:
            self._target(name, held)
            held.add(name)
        task = self._new("copy", len(targets), ", ".join(targets), now_s)
        if targets:
            self._copy_next(task, slot, list(targets), now_s)
        else:
            task.end("done", now_s, "the object has a replica on each target already")
        return task.task_id

    def move(self, key: bytes, source: str, target: str, now_s: float) -> int:
        slot = self._slot(key, now_s)
        held = {each.segment for each in self._index.placements(slot)}
        segment = self._segments.get(source)
        if source not in held or segment is None or segment.tier is not Tier.DRAM:
            raise InvalidInput(f"the object has no replica in memory on segment {source!r}", param="source")
        self._target(target, held)
        task = self._new("move", 1, target, now_s)
        version = self._index.table.version[slot]

        def on_copied(key: bytes, refusal: Refusal | None, now_s: float) -> None:
            self._moved(task, key, version, source, refusal, now_s)
            task.end("done" if refusal is None else "failed", now_s, "" if refusal is None else refusal.message)

        self._start_copy(task, slot, target, on_copied, now_s)
        return task.task_id

    def drain(self, name: str, now_s: float) -> int:
        """Place nothing new on the segment, and move its objects to others; those for which no other memory has room
        stay on SSD, if they are there. Return the task's id."""
        segment = self._segments.get(name)
        if segment is None:
            raise NotFound(f"no segment {name!r} is mounted")
        if segment.tier is not Tier.DRAM:
            raise InvalidInput("only memory can be drained: an SSD's objects are read from where they are")
        if segment.number in self._drains:
            return self._drains[segment.number].task.task_id
        task = self._new("drain", segment.num_replicas, name, now_s, segment.number)
        self._set_draining(segment.number, True)
        self._drains[segment.number] = _Drain(task, now_s)
        return task.task_id

    # drains in steps

    def step(self, now_s: float, limit: int) -> bool:
        """Move some objects. Return whether there is more to do soon."""
        moved = [self._step(number, drain, now_s, limit) for number, drain in list(self._drains.items())]
        return any(moved)

    def _step(self, number: int, drain: _Drain, now_s: float, limit: int) -> bool:
        segment, task = self._segments.by_number.get(number), drain.task
        if segment is None:
            return self._end(number, "failed", "the segment is gone", now_s)
        # A writer that has gone may still write there for minutes, but no object will be there.
        if segment.num_replicas == self._space.num_of_ended_puts(number):
            segment.emptied = True
            return self._end(number, "done", "", now_s)
        if now_s > drain.moved_s + self._rules.put_discard_s + _STUCK_S:
            left = f"{segment.num_replicas} objects stay: there is no room for them, or they are being written"
            return self._end(number, "failed", left, now_s)
        started = 0
        for slot in self._slots_on(number, drain):
            if task.in_flight >= self._rules.task_moves_in_flight or started >= limit:
                break
            drain.cursor = slot + 1
            started += self._move_away(segment, drain, slot, now_s)
        return started > 0

    def _move_away(self, segment: MountedSegment, drain: _Drain, slot: int, now_s: float) -> int:
        """Move one object off the segment. Return 1 if a copy was started or a replica removed, else 0."""
        table, task = self._index.table, drain.task
        replicas = table.dram_replicas(slot)
        here = [each for each in replicas if each.segment == segment.number]
        key, version = table.keys[slot], table.version[slot]
        if not here or key is None:
            return 0
        if len(replicas) > len(here):
            return self._drop_here(drain, slot, here, now_s)

        def on_copied(key: bytes, refusal: Refusal | None, now_s: float) -> None:
            task.in_flight -= 1
            if refusal is None:
                drain.moved_s = now_s
            self._moved(task, key, version, segment.name, refusal, now_s)

        if self._copies.start(slot, now_s, on_copied=on_copied):
            task.in_flight += 1
            return 1
        if self._index.is_on_live_ssd(slot) and not self._copies.is_copying(key):  # no memory has room: it stays on SSD
            return self._drop_here(drain, slot, here, now_s)
        return 0

    def _drop_here(self, drain: _Drain, slot: int, here: list[Replica], now_s: float) -> int:
        self._index.drop_replicas(slot, here, now_s)
        drain.task.advance(0, now_s)
        drain.moved_s = now_s
        return 1

    def _slots_on(self, number: int, drain: _Drain) -> list[int]:
        """Return the next slots that may have a replica on the segment, from a bounded scan."""
        table = self._index.table
        if drain.cursor >= table.end:
            drain.cursor = 0
        start, end = drain.cursor, min(drain.cursor + _SCAN_SLOTS, table.end)
        here = (table.dram_segments[start:end] == number) | (table.all_flags[start:end] & Flag.EXTRA != 0)
        found: list[int] = (np.flatnonzero(here) + start).tolist()
        if not found:
            drain.cursor = end
        return found

    def _end(self, number: int, state: str, message: str, now_s: float) -> bool:
        """End a drain. If it failed, the segment takes new objects again."""
        if state == "failed":
            self._set_draining(number, False)
        self._drains.pop(number).task.end(state, now_s, message)
        return False

    # one object

    def _copy_next(self, task: Task, slot: int, targets: list[str], now_s: float) -> None:
        """Copy to one target after the other: each copy changes which replicas the next one may read."""
        nbytes = self._index.table.nbytes[slot]

        def on_copied(key: bytes, refusal: Refusal | None, now_s: float) -> None:
            if refusal is not None:
                task.end("failed", now_s, refusal.message)
                return
            task.advance(nbytes, now_s)
            following = self._index.find(key, now_s)
            if not targets:
                task.end("done", now_s)
            elif following is None:
                task.end("failed", now_s, "the object was removed meanwhile")
            elif task.state == "running":
                try:
                    self._copy_next(task, following, targets, now_s)
                except NoSpace as error:
                    task.end("failed", now_s, str(error))

        self._start_copy(task, slot, targets.pop(0), on_copied, now_s)

    def _start_copy(
        self,
        task: Task,
        slot: int,
        target: str,
        on_copied: Callable[[bytes, Refusal | None, float], None],
        now_s: float,
    ) -> None:
        drams = list(self._segments.of_tier(Tier.DRAM))
        others = {each.node for each in drams} - {each.node for each in drams if each.name == target}
        if not self._copies.start(slot, now_s, preferred=(target,), avoid_nodes=sorted(others), on_copied=on_copied):
            task.end("failed", now_s, "no space")
            raise NoSpace(f"segment {target!r} has no space for the object, or it is being copied already")

    def _moved(self, task: Task, key: bytes, version: int, source: str, refusal: Refusal | None, now_s: float) -> None:
        """Remove the old replica after the new one is made."""
        if refusal is not None:
            return
        table = self._index.table
        slot = self._index.find(key, now_s)
        if slot is None or table.version[slot] != version:
            return
        replicas = table.dram_replicas(slot)
        old = [each for each in replicas if self._segments.by_number[each.segment].name == source]
        if old and len(replicas) > len(old):
            self._index.drop_replicas(slot, old, now_s)
        task.advance(table.nbytes[slot], now_s)

    def _slot(self, key: bytes, now_s: float) -> int:
        slot = self._index.find(key, now_s)
        if slot is None:
            raise NotFound("no such object")
        return slot

    def _target(self, name: str, held: set[str]) -> None:
        segment = self._segments.get(name)
        if segment is None or segment.tier is not Tier.DRAM or not segment.takes_new:
            raise InvalidInput(f"segment {name!r} is not mounted, or takes no new objects", param="target")
        if name in held:
            raise InvalidInput(f"the object has a replica on segment {name!r} already", param="target")

    def _set_draining(self, number: int, on: bool) -> None:
        segment = self._segments.by_number.get(number)
        if segment is not None:
            segment.draining, segment.emptied = on, False
            self._index.outcomes.add(Draining(number, on))

    def _new(self, kind: str, num_total: int, segment: str, now_s: float, number: int = 0) -> Task:
        finished = [each.task_id for each in self._tasks.values() if each.state != "running"]
        for task_id in finished[: max(0, len(finished) - _MAX_FINISHED)]:
            del self._tasks[task_id]
        task = self._tasks[self._next_id] = Task(self._next_id, kind, num_total, segment, now_s, number)
        self._next_id += 1
        return task
