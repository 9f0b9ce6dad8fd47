"""What the tests of files share."""

from __future__ import annotations

import gc
import os

from moonpool.transfer import FileSegment, Segment, SegmentDescriptor, host_id
from moonpool.transfer.transports.file.transport import FileRemote

MIB = 1 << 20
T = 10.0


def fd_count() -> int:
    """Without what earlier tests left to the collector."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def read(segment: FileSegment | FileRemote, offset: int = 0, nbytes: int | None = None) -> bytes:
    """The bytes from `offset` on, to the end unless told."""
    found = bytearray(segment.nbytes - offset if nbytes is None else nbytes)
    segment.read_into(offset, [found], timeout_s=T)
    return bytes(found)


def describe(segment: Segment, endpoint: str) -> SegmentDescriptor:
    return SegmentDescriptor(
        name=segment.name,
        nbytes=segment.nbytes,
        incarnation=segment.incarnation,
        host=host_id(),
        endpoints=(endpoint,),
    )
