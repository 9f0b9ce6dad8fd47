"""Copies, moves and drains by request: the nodes do them, the master keeps the books, this asks and waits."""

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
    """Segments are named as stats() names them. A request is said once: after PeerLost it may be under way or not."""

    def __init__(self, line: MasterClient) -> None:
        self._line = line

    def copy(self, key: Key, targets: Sequence[str]) -> int:
        """One more replica on each of these segments; the number of the task.

        NotFound: no such object. InvalidInput: a target has one already or is not mounted. NoSpace.
        """
        return self._line.ask_once(m.CopyObject(key=key_bytes(key), targets=tuple(targets)))

    def move(self, key: Key, source: str, target: str) -> int:
        """The replica on `source` goes to `target`; raises as copy()."""
        return self._line.ask_once(m.MoveObject(key=key_bytes(key), source=source, target=target))

    def drain(self, segment: str) -> int:
        """Nothing new is placed on the segment and what is there moves away. NotFound when it is not mounted."""
        return self._line.ask(m.DrainSegment(segment=segment))

    def query(self, task_id: int) -> TaskInfo | None:
        """None for a number that was never given, or was finished long ago."""
        return self._line.ask(m.QueryTask(task_id=task_id))

    def running(self) -> list[TaskInfo]:
        """The oldest first."""
        return self._line.ask(m.ListTasks())

    def all(self) -> list[TaskInfo]:
        """Those that run and those that ended lately, whoever asked for them."""
        return self._line.ask(m.ListTasks(finished=True))

    def cancel(self, task_id: int) -> bool:
        """False when it was not running any more."""
        return self._line.ask(m.CancelTask(task_id=task_id))

    def wait(self, task_id: int, timeout_s: float = 60.0) -> TaskInfo:
        """The task when it has ended, well or not: see its `state` and `message`.

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
