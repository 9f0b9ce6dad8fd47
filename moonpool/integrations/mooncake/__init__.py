"""Mooncake's Python API on our store, so that engines written for it use the pool as they are.

Upstream's wheel owns the module name `mooncake`, so ours is opt-in: put the folder that
`python -m moonpool.integrations.mooncake` prints on PYTHONPATH, and `from mooncake.store import
MooncakeDistributedStore` finds this one. Results are upstream's numbers (codes.py): 0 or a byte count, else an error
below zero; no call raises because of the pool.
"""

from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.integrations.mooncake.replica_descriptor import (
    Descriptor,
    DiskDescriptor,
    MemoryDescriptor,
    ReplicaDescriptor,
    ReplicaStatus,
)
from moonpool.integrations.mooncake.replicate_config import ObjectDataType, ReplicateConfig, SoftPinAction
from moonpool.integrations.mooncake.shadow_path import shadow_path
from moonpool.integrations.mooncake.store import MooncakeDistributedStore

__all__ = [
    "Descriptor",
    "DiskDescriptor",
    "ErrorCode",
    "MemoryDescriptor",
    "MooncakeDistributedStore",
    "ObjectDataType",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "shadow_path",
]
