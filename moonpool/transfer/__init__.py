"""Moves bytes between memories: registered segments, several transports, one interface. No torch needed."""

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.transfer.batch import Batch, TransferOp, TransferRequest, TransferStatus
from moonpool.transfer.config import TransferConfig, WireConfig
from moonpool.transfer.control import Notification, PeerInfo
from moonpool.transfer.directory import Directory, MemoryDirectory
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.memory.buffers import RawMemory, aligned_buffer, as_bytes_view
from moonpool.transfer.memory.fence import Fence
from moonpool.transfer.memory.location import Location, host_id, parse_location
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.paths.multipath import MultiPathRemote
from moonpool.transfer.paths.path_load import PathState
from moonpool.transfer.paths.peer_paths import PathReport
from moonpool.transfer.paths.priority import Priority
from moonpool.transfer.pending import Pending
from moonpool.transfer.register import make_segment
from moonpool.transfer.transports.base import RemoteSegment, Transport
from moonpool.transfer.transports.cuda.segment import DeviceSegment
from moonpool.transfer.transports.file.segment import FileSegment
from moonpool.transfer.transports.memory import MemoryFabric

__all__ = [
    "Batch",
    "DeviceSegment",
    "Directory",
    "Fence",
    "FileSegment",
    "Location",
    "MemoryDirectory",
    "MemoryFabric",
    "MultiPathRemote",
    "Notification",
    "PathReport",
    "PathState",
    "PeerInfo",
    "Pending",
    "Priority",
    "RawMemory",
    "RemoteSegment",
    "Segment",
    "SegmentDescriptor",
    "TransferConfig",
    "TransferEngine",
    "TransferOp",
    "TransferRequest",
    "TransferStatus",
    "Transport",
    "WireConfig",
    "aligned_buffer",
    "as_bytes_view",
    "host_id",
    "make_segment",
    "parse_location",
]
