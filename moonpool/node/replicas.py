"""Where a node finds the replicas that its orders speak of: in its own memory, on its own disk, or at another node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from moonpool.base.errors import NotFound
from moonpool.store.messages import Placement
from moonpool.transfer.memory.buffers import Buffer, as_bytes_views, copy_bytes
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.base import check_bounds


class Readable(Protocol):
    """A remote segment, a folder, or memory of our own."""

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None: ...


OpenSource = Callable[[Placement], Readable]


class OwnMemory:
    """This node's memory, read as if it were another's."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        memory = self._segment.memory
        for view in as_bytes_views(buffers, writable=True):
            check_bounds(offset, view.nbytes, memory.nbytes)
            copy_bytes(view, memory[offset : offset + view.nbytes])
            offset += view.nbytes


def check_here(placement: Placement, segment: Segment, nbytes: int) -> None:
    """NotFound unless the placement is of this segment as it is mounted now."""
    if placement.segment != segment.name or placement.incarnation != segment.incarnation:
        raise NotFound(f"segment {placement.segment!r} was mounted anew or is not here")
    check_bounds(placement.offset, nbytes, segment.nbytes)
