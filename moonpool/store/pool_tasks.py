"""Copies, moves and drains on request. The nodes carry them out, the master tracks them, PoolTasks asks and waits."""

from __future__ import annotations

import time
from collections.abc import Sequence

from moonpool.base.backoff import Backoff
from moonpool.base.clock import Deadline
from moonpool.base.errors import DeadlineExceeded, NotFound
from moonpool.store import messages as m
from moonpool.store.client.master_client import MasterClient
from moonpool.store.keys_text import Key, key_bytes
from moonpool.store.messages import TaskInfo

RUNNING = "running"
_FIRST_POLL_S = 0.005
_LONGEST_POLL_S = 0.5


class PoolTasks:
    """Segment names are those of stats(). copy() and move() are sent once: after PeerLost the task may be running."""

    def __init__(self, master: MasterClient) -> None:
        self._master = master

    def copy(self, key: Key, targets: Sequence[str], *, missing_only: bool = False) -> int:
        """Make one more replica on each of these segments; with `missing_only`, on those that have none. Return the
        task's number.

        NotFound: no such object. InvalidInput: a target has one already or is not mounted. NoSpace.
        """
        call = m.CopyObject(key=key_bytes(key), targets=tuple(targets), missing_only=missing_only)
        return self._master.call_once(call)

    def move(self, key: Key, source: str, target: str) -> int:
        """Move the replica on `source` to `target`. Return the task's number; raise as copy()."""
        return self._master.call_once(m.MoveObject(key=key_bytes(key), source=source, target=target))

    def drain(self, segment: str) -> int:
        """Move all objects away from the segment, and place no new ones there. NotFound when it is not mounted."""
        return self._master.call(m.DrainSegment(segment=segment))

    def query(self, task_id: int) -> TaskInfo | None:
        """Return the task; None for an unknown number, or a task that ended long ago."""
        return self._master.call(m.QueryTask(task_id=task_id))

    def running(self) -> list[TaskInfo]:
        """Return the running tasks, the oldest first."""
        return self._master.call(m.ListTasks())

    def all(self) -> list[TaskInfo]:
        """Return the running tasks and those that ended recently, of all clients."""
        return self._master.call(m.ListTasks(finished=True))

    def cancel(self, task_id: int) -> bool:
        """Cancel the task. Return False when it was no longer running."""
        return self._master.call(m.CancelTask(task_id=task_id))

    def wait(self, task_id: int, timeout_s: float = 60.0) -> TaskInfo:
        """Wait for the end of the task and return it, done or failed: see its `state` and `message`.

        NotFound when it is not known, DeadlineExceeded when it still runs.
        """
        deadline, backoff = Deadline(timeout_s), Backoff(_FIRST_POLL_S, _LONGEST_POLL_S)
        while True:
            task = self.query(task_id)
            if task is None:
                raise NotFound(f"the master knows no task {task_id}")
            if task.state != RUNNING:
                return task
            if deadline.expired():
                raise DeadlineExceeded(
                    f"task {task_id} has done {task.num_done} of {task.num_total} after {timeout_s:g} s"
                )
            time.sleep(min(backoff.next_s(), deadline.remaining_s()))
