"""What upstream tells about replicas: where each one lies and of which kind it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


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

    size: int
    buffer_address: int
    transport_endpoint: str  # the segment's name


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
