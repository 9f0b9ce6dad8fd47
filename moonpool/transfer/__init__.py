"""Moves bytes between memories: registered segments, several transports, one interface. No torch needed."""

from moonpool.transfer.batch import Batch, TransferOp, TransferRequest, TransferStatus
from moonpool.transfer.buffers import aligned_buffer, as_bytes_view
from moonpool.transfer.config import TransferConfig, WireConfig
from moonpool.transfer.descriptor import SegmentDescriptor
from moonpool.transfer.desk import PeerInfo
from moonpool.transfer.directory import Directory, MemoryDirectory
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.foreign import RawMemory
from moonpool.transfer.host import host_id
from moonpool.transfer.location import Location, parse_location
from moonpool.transfer.mailbox import Notification
from moonpool.transfer.multipath import MultiPathRemote
from moonpool.transfer.path_load import PathState
from moonpool.transfer.paths import PathReport
from moonpool.transfer.pending import Pending
from moonpool.transfer.priority import Priority
from moonpool.transfer.register import make_segment
from moonpool.transfer.segment import Fence, Segment
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
