"""`mooncake.store`, served by Moonpool's pool."""

from moonpool.integrations.mooncake import (
    BufferHandle,
    Descriptor,
    DiskDescriptor,
    MemoryDescriptor,
    MooncakeDistributedStore,
    ObjectDataType,
    QueryTaskResponse,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
    TaskStatus,
    TaskType,
)
from moonpool.integrations.mooncake.buffer_pool import (
    BufferLease,
    BufferLeaseView,
    BufferPool,
    RegisteredBufferLease,
    RegisteredBufferLeaseView,
    RegisteredBufferPool,
)
from moonpool.integrations.mooncake.host_memory import (
    MooncakeHostMemAllocator,
    bind_to_numa_node,
    get_alloc_func_addr,
    get_free_func_addr,
)
from moonpool.integrations.mooncake.nof_register import MooncakeDistributedNoFRegister
from moonpool.integrations.mooncake.parallel_layout import ParallelAxis, ReadTarget, TensorParallelism
from moonpool.integrations.mooncake.tensor_memory import deserialize_tensor as _deserialize_tensor
from moonpool.integrations.mooncake.tensor_memory import serialize_tensor as _serialize_tensor
from moonpool.integrations.mooncake.tensor_memory import tensor_metadata_size as _tensor_metadata_size

# Upstream's module has the members of its enums by their bare names; PROCESSING and FAILED are those of TaskStatus.
UNDEFINED, INITIALIZED, COMPLETE, REMOVED = (
    ReplicaStatus.UNDEFINED,
    ReplicaStatus.INITIALIZED,
    ReplicaStatus.COMPLETE,
    ReplicaStatus.REMOVED,
)
PENDING, PROCESSING, FAILED, SUCCESS = TaskStatus
REPLICA_COPY, REPLICA_MOVE = TaskType
(
    UNKNOWN,
    KVCACHE,
    TENSOR,
    WEIGHT,
    SAMPLE,
    ACTIVATION,
    GRADIENT,
    OPTIMIZER_STATE,
    METADATA,
    GENERAL,
) = ObjectDataType

__all__ = [
    "ACTIVATION",
    "COMPLETE",
    "FAILED",
    "GENERAL",
    "GRADIENT",
    "INITIALIZED",
    "KVCACHE",
    "METADATA",
    "OPTIMIZER_STATE",
    "PENDING",
    "PROCESSING",
    "REMOVED",
    "REPLICA_COPY",
    "REPLICA_MOVE",
    "SAMPLE",
    "SUCCESS",
    "TENSOR",
    "UNDEFINED",
    "UNKNOWN",
    "WEIGHT",
    "BufferHandle",
    "BufferLease",
    "BufferLeaseView",
    "BufferPool",
    "Descriptor",
    "DiskDescriptor",
    "MemoryDescriptor",
    "MooncakeDistributedNoFRegister",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ParallelAxis",
    "QueryTaskResponse",
    "ReadTarget",
    "RegisteredBufferLease",
    "RegisteredBufferLeaseView",
    "RegisteredBufferPool",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "TensorParallelism",
    "_deserialize_tensor",
    "_serialize_tensor",
    "_tensor_metadata_size",
    "bind_to_numa_node",
    "get_alloc_func_addr",
    "get_free_func_addr",
]
