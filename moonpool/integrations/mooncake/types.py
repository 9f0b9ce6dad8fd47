"""Upstream's types: `ReplicateConfig`, the options of a put; `ReplicaDescriptor`, where a replica is; `BufferHandle`, a
value that was read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.store.client import PutOptions

_MAX_TTL_MS = 2**64
_SOFT_PIN_TTL_MS = 30 * 60 * 1000
_MAX_SOFT_PIN_TTL_MS = 24 * 60 * 60 * 1000


class ReplicaStatus(IntEnum):
    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


@dataclass(frozen=True)
class Descriptor:
    """`size` is as stored, header included; the address counts from the segment's start."""

    size: int = 0
    buffer_address: int = 0
    transport_endpoint: str = ""  # host:port of the client that offers the memory, or the segment's name


@dataclass(frozen=True)
class MemoryDescriptor:
    buffer_descriptor: Descriptor


@dataclass(frozen=True)
class DiskDescriptor:
    file_path: str
    object_size: int


@dataclass(frozen=True)
class ReplicaDescriptor:
    """One readable replica. Its kind decides which of the two descriptors there is; the other is a ValueError."""

    placed: MemoryDescriptor | DiskDescriptor
    status: ReplicaStatus = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        return isinstance(self.placed, MemoryDescriptor)

    def is_disk_replica(self) -> bool:
        """Of a shared file system, in upstream's words; the pool has none."""
        return False

    def is_local_disk_replica(self) -> bool:
        """On a node's SSD."""
        return isinstance(self.placed, DiskDescriptor)

    def get_memory_descriptor(self) -> MemoryDescriptor:
        if not isinstance(self.placed, MemoryDescriptor):
            raise ValueError("this replica is not in memory")
        return self.placed

    def get_disk_descriptor(self) -> DiskDescriptor:
        if not isinstance(self.placed, DiskDescriptor):
            raise ValueError("this replica is not on disk")
        return self.placed


class TaskType(IntEnum):
    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class TaskStatus(IntEnum):
    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


@dataclass(frozen=True)
class QueryTaskResponse:
    """A copy or move. `assigned_client` is always (0, 0): nodes of the pool do the work, not clients."""

    id: tuple[int, int] = (0, 0)
    type: TaskType = TaskType.REPLICA_COPY
    status: TaskStatus = TaskStatus.PENDING
    created_at_ms_epoch: int = 0
    last_updated_at_ms_epoch: int = 0
    assigned_client: tuple[int, int] = (0, 0)
    message: str = ""


class SoftPinAction(IntEnum):
    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(IntEnum):
    """What the bytes are for. Accepted for compatibility and not recorded."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


@dataclass(slots=True)
class ReplicateConfig:
    """Unknown attributes are AttributeErrors; a time that is no unsigned 64-bit number is a TypeError."""

    replica_num: int = 1
    nof_replica_num: int = 0
    dfs_replica_num: int = 0
    soft_pin_action: SoftPinAction = SoftPinAction.PRESERVE
    soft_pin_ttl_ms: int | None = None
    with_hard_pin: bool = False
    preferred_segments: list[str] = field(default_factory=list)
    preferred_segment: str = ""
    preferred_nof_segments: list[str] = field(default_factory=list)
    prefer_alloc_in_same_node: bool = False
    data_type: ObjectDataType = ObjectDataType.UNKNOWN
    group_ids: list[str] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "soft_pin_ttl_ms" and value is not None and not 0 <= value < _MAX_TTL_MS:
            raise TypeError(f"soft_pin_ttl_ms is an unsigned 64-bit number or None, not {value}")
        object.__setattr__(self, name, value)

    @property
    def preferred(self) -> Sequence[str]:
        """The segments to try first; the older of the two settings counts more, as upstream has it."""
        return [self.preferred_segment] if self.preferred_segment else self.preferred_segments

    def check(self, num_keys: int) -> ErrorCode:
        """OK, or why no put may be made with it."""
        if self.replica_num < 1 or self.nof_replica_num < 0 or self.dfs_replica_num < 0:
            return ErrorCode.INVALID_PARAMS
        if self.nof_replica_num or self.dfs_replica_num:
            return ErrorCode.NOT_SUPPORTED
        if self.soft_pin_ttl_ms is not None and self.soft_pin_action is not SoftPinAction.ENABLE:
            return ErrorCode.INVALID_PARAMS
        if self.group_ids is not None and len(self.group_ids) != num_keys:
            return ErrorCode.INVALID_PARAMS
        if self.prefer_alloc_in_same_node and self.replica_num != 1:
            return ErrorCode.INVALID_PARAMS
        return ErrorCode.OK

    def options(self, segments: tuple[str, ...], replace: bool = False) -> PutOptions:
        """The same in the store's words; `segments` are the preferred ones by the names they have there."""
        ttl_ms = _SOFT_PIN_TTL_MS if self.soft_pin_ttl_ms is None else self.soft_pin_ttl_ms
        soft_pin_ms = min(ttl_ms, _MAX_SOFT_PIN_TTL_MS) if self.soft_pin_action is SoftPinAction.ENABLE else 0
        return PutOptions(
            num_replicas=self.replica_num,
            preferred=segments,
            hard_pin=self.with_hard_pin,
            soft_pin_s=soft_pin_ms / 1000,
            replace=replace,
            keep_pins=replace and self.soft_pin_action is not SoftPinAction.DISABLE,
        )


class BufferHandle(bytearray):
    """The bytes of one value, writable and owned by this object. It offers the buffer protocol; keep the object for as
    long as its address is used.
    """

    def ptr(self) -> int:
        """Return the address of the first byte; 0 when there is none."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self)) if self else 0

    def size(self) -> int:
        return len(self)
