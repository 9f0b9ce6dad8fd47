"""Moves bytes between memories: registered segments, several transports, one interface. No torch needed."""

from moonpool.transfer.batch import Batch, TransferOp, TransferRequest, TransferStatus
from moonpool.transfer.buffers import aligned_buffer, as_bytes_view
from moonpool.transfer.descriptor import SegmentDescriptor
from moonpool.transfer.engine import TransferConfig, TransferEngine
from moonpool.transfer.host import host_id
from moonpool.transfer.segment import Fence, Segment
from moonpool.transfer.transports.base import RemoteSegment, Transport
from moonpool.transfer.transports.file_segment import FileSegment
from moonpool.transfer.transports.memory import MemoryFabric

__all__ = [
    "Batch",
    "Fence",
    "FileSegment",
    "MemoryFabric",
    "RemoteSegment",
    "Segment",
    "SegmentDescriptor",
    "TransferConfig",
    "TransferEngine",
    "TransferOp",
    "TransferRequest",
    "TransferStatus",
    "Transport",
    "aligned_buffer",
    "as_bytes_view",
    "host_id",
]
