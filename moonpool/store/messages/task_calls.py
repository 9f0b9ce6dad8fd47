"""Copies, moves and drains that somebody asks for."""

from __future__ import annotations

from moonpool.base.ranges import Whole
from moonpool.base.rpc import Call
from moonpool.store.messages.values import TaskInfo


class CopyObject(Call[int]):
    """One more replica on each target segment; the number of the task."""

    key: bytes
    targets: tuple[str, ...]


class MoveObject(Call[int]):
    key: bytes
    source: str
    target: str


class DrainSegment(Call[int]):
    """Nothing new is placed there, and what is there moves away; the number of the task."""

    segment: str


class QueryTask(Call[TaskInfo | None]):
    task_id: Whole


class ListTasks(Call[list[TaskInfo]]):
    """Those that are running, the oldest first; with `finished` also those that ended lately."""

    finished: bool = False


class CancelTask(Call[bool]):
    task_id: Whole
