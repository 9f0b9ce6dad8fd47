"""What a tcp server needs to serve a file or a GPU's memory: a few buffers that all its connections share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from moonpool.base.errors import Internal
from moonpool.transfer.disk.bounce import BouncePool
from moonpool.transfer.memory.buffers import Buffer
from moonpool.transfer.memory.segment import Segment

_PART_NBYTES = 1024 * 1024
_MAX_PARTS = 16
_ALIGNMENT = 4096


@runtime_checkable
class StagedSegment(Protocol):
    """A segment that has no memory to show and copies to and from its owner's instead."""

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None: ...

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None: ...


def staging_buffers() -> BouncePool:
    """Bounded whatever the number of connections; a request waits for one within its stall timeout."""
    return BouncePool(_PART_NBYTES, _MAX_PARTS, _ALIGNMENT)


def staged(segment: Segment) -> StagedSegment:
    if not isinstance(segment, StagedSegment):
        raise Internal(f"segment {segment.name!r} offers neither memory nor copies")
    return segment


def parts_of(buffer: memoryview, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """(start, room for the bytes from there on) until all `nbytes` had theirs; one empty part where there are none."""
    for start in range(0, max(nbytes, 1), buffer.nbytes):
        yield start, buffer[: min(buffer.nbytes, nbytes - start)]
