"""`TaskCalls`: where the replicas of an object are, their removal, and tasks that copy or move them.

The pool's nodes carry tasks out and its master tracks them, so every client can ask about every task. A segment is
named by `host:port` of the client that offers it, or by its name in the pool.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from moonpool.base.errors import InvalidInput, NotFound
from moonpool.integrations.mooncake.base_store import StoreBase
from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.integrations.mooncake.segment_names import endpoint_of
from moonpool.integrations.mooncake.types import (
    Descriptor,
    DiskDescriptor,
    MemoryDescriptor,
    QueryTaskResponse,
    ReplicaDescriptor,
    TaskStatus,
    TaskType,
)
from moonpool.store import Store
from moonpool.store.messages import Lookup, ObjectInfo, Placement, TaskInfo, Tier

TaskId: TypeAlias = tuple[int, int]  # upstream's UUID; the second half is always 0 here
_NO_TASK: TaskId = (0, 0)
_STATUS = {
    "running": TaskStatus.PROCESSING,
    "done": TaskStatus.SUCCESS,
    "failed": TaskStatus.FAILED,
    "cancelled": TaskStatus.FAILED,
}
_TYPES = {"copy": TaskType.REPLICA_COPY, "move": TaskType.REPLICA_MOVE}


class TaskCalls(StoreBase):
    # where replicas are

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """Return the replicas of one object; [] when it does not exist."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Return the replicas by key, and lease the objects. Keys that do not exist are left out."""

        def look_up(client: Store) -> dict[str, list[ReplicaDescriptor]]:
            infos = client.lookup([self._key(key) for key in keys])
            tiers = {each.name: each.tier for each in client.stats().segments}
            return {key: _describe(info, tiers) for key, info in zip(keys, infos, strict=True) if info is not None}

        return self._ask("get_replica_desc", look_up, lambda _: {})

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Remove the replicas in memory of the segment, or without a name the objects. Return the keys for which that
        was done: leased, pinned and missing objects are left out.
        """

        def clear(client: Store) -> list[bool]:
            names = [self._key(key) for key in keys]
            if segment_name:
                return client.remove_replicas(names, self._resolve(segment_name))
            found = client.master.call(Lookup(keys=names, lease=False))
            gone = client.remove_many(names)
            return [info is not None and is_gone for info, is_gone in zip(found, gone, strict=True)]

        cleared = self._ask("batch_replica_clear", clear, lambda _: [False] * len(keys)) if keys else []
        return [key for key, is_cleared in zip(keys, cleared, strict=True) if is_cleared]

    # tasks

    def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[TaskId, int]:
        """Start to copy the object to each target that has no replica of it. Return the task and 0; or (0, 0) and -704
        when there is no such object, -600 for an unknown target, -200 when a target is full.
        """

        def create(client: Store) -> tuple[TaskId, int]:
            self._check_stored(client, key)
            segments = [name for target in targets for name in self._segments_named(target)]
            return (client.tasks.copy(self._key(key), segments, missing_only=True), 0), ErrorCode.OK

        return self._ask("create_copy_task", create, lambda code: (_NO_TASK, code))

    def create_move_task(self, key: str, source: str, target: str) -> tuple[TaskId, int]:
        """Start to move the replica on `source` to `target`. Return the task and 0; otherwise as create_copy_task(),
        and -600 also when the two are the same or `source` has no replica.
        """

        def create(client: Store) -> tuple[TaskId, int]:
            held = {each.segment for each in self._check_stored(client, key).replicas}
            sources = self._segments_named(source)
            here = next((name for name in sources if name in held), sources[0])
            there = self._segments_named(target)[0]
            return (client.tasks.move(self._key(key), here, there), 0), ErrorCode.OK

        return self._ask("create_move_task", create, lambda code: (_NO_TASK, code))

    def query_task(self, task_id: TaskId) -> tuple[QueryTaskResponse | None, int]:
        """Return the task and 0; or None and -1400 when it is unknown, or ended long ago."""

        def query(client: Store) -> tuple[QueryTaskResponse | None, int]:
            number, other_half = task_id
            found = client.tasks.query(number) if number > 0 and not other_half else None
            if found is None or found.kind not in _TYPES:
                return None, ErrorCode.TASK_NOT_FOUND
            return _response(found, time.time()), ErrorCode.OK

        return self._ask("query_task", query, lambda code: (None, code))

    def _check_stored(self, client: Store, key: str) -> ObjectInfo:
        """Return where the object is. Raise NotFound when there is none."""
        (info,) = client.master.call(Lookup(keys=[self._key(key)], lease=False))
        if info is None:
            raise NotFound("no such object")
        return info

    def _resolve(self, endpoint: str) -> tuple[str, ...]:
        """Return the segments of that name. This store's own name stands for its own memory: another store may have the
        same name, and a put may have placed one replica on each.
        """
        session = self._session
        if session is None:
            return ()
        own = session.memory.segments() if endpoint == session.hostname else ()
        return own or session.names.resolve(endpoint, fresh=True)

    def _segments_named(self, endpoint: str) -> tuple[str, ...]:
        """Return the segments of that name, one at least. Raise InvalidInput when there is none."""
        found = self._resolve(endpoint)
        if not found:
            raise InvalidInput(f"no segment {endpoint!r} is mounted")
        return found


def _describe(info: ObjectInfo, tiers: Mapping[str, Tier]) -> list[ReplicaDescriptor]:
    return [ReplicaDescriptor(_placed(info.nbytes, replica, tiers)) for replica in info.replicas]


def _placed(nbytes: int, replica: Placement, tiers: Mapping[str, Tier]) -> MemoryDescriptor | DiskDescriptor:
    if tiers.get(replica.segment) is Tier.SSD:
        return DiskDescriptor(replica.segment, nbytes)
    return MemoryDescriptor(Descriptor(nbytes, replica.offset, endpoint_of(replica.segment)))


def _response(task: TaskInfo, now_s: float) -> QueryTaskResponse:
    return QueryTaskResponse(
        id=(task.task_id, 0),
        type=_TYPES[task.kind],
        status=_STATUS[task.state],
        created_at_ms_epoch=int((now_s - task.age_s) * 1000),
        last_updated_at_ms_epoch=int((now_s - task.idle_s) * 1000),
        message=task.message,
    )
