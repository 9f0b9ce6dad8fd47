"""Mooncake's Python API on our store, so that engines written for Mooncake use the pool without changes.

Upstream's wheel owns the module name `mooncake`, so ours is opt-in: put the folder that
`python -m moonpool.integrations.mooncake` prints on PYTHONPATH, and `from mooncake.store import
MooncakeDistributedStore` finds this one. Results are upstream's numbers (codes.py): 0 or a byte count, else an error
below zero; no call raises because of the pool.
"""

from pathlib import Path

from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.integrations.mooncake.store import MooncakeDistributedStore
from moonpool.integrations.mooncake.types import (
    BufferHandle,
    Descriptor,
    DiskDescriptor,
    MemoryDescriptor,
    ObjectDataType,
    QueryTaskResponse,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
    TaskStatus,
    TaskType,
)

__all__ = [
    "BufferHandle",
    "Descriptor",
    "DiskDescriptor",
    "ErrorCode",
    "MemoryDescriptor",
    "MooncakeDistributedStore",
    "ObjectDataType",
    "QueryTaskResponse",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "shadow_path",
]


def shadow_path() -> str:
    """Return the folder for PYTHONPATH that holds a package named `mooncake`. It hides an installed Mooncake."""
    return str(Path(__file__).resolve().parent / "shadow")
