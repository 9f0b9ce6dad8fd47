"""A segment of GPU memory. Its fence lies in main memory; its bytes are copied, never shown.

Ownership: the segment holds its memory (its own, or the tensor it was given) and lets go of it in close(); the memory
goes when the last transfer that uses it is over. Whoever computes on that memory must have waited for its kernels
before it tells others to read, as with any memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from moonpool.base.clock import Deadline
from moonpool.base.errors import InvalidInput, Unavailable
from moonpool.transfer.memory.buffers import Buffer, DeviceSpan, Memory, as_memory, device_span
from moonpool.transfer.memory.fence import make_fence
from moonpool.transfer.memory.segment import Segment, check_sizes
from moonpool.transfer.transports.base import check_bounds
from moonpool.transfer.transports.cuda.copy import Placed, mover_of
from moonpool.transfer.transports.cuda.driver import Device, driver


class DeviceSegment(Segment):
    """Make one with create() or adopt()."""

    in_memory: ClassVar[bool] = False

    def __init__(
        self, name: str, span: DeviceSpan, device: Device, *, granule_nbytes: int | None, incarnation: int
    ) -> None:
        check_sizes(span.nbytes, granule_nbytes)
        fence = make_fence(span.nbytes, granule_nbytes)
        super().__init__(name, memoryview(b""), incarnation=incarnation, fence=fence, location=str(device))
        self.nbytes = span.nbytes
        self.device = device
        self._span: DeviceSpan | None = span

    @classmethod
    def create(
        cls, name: str, nbytes: int, *, device: int, granule_nbytes: int | None = None, incarnation: int
    ) -> DeviceSegment:
        """Zeroed memory of GPU `device`. NoSpace when it has not that much left, Unavailable without a driver."""
        check_sizes(nbytes, granule_nbytes)
        memory = driver().device(device).allocate(nbytes)
        span = DeviceSpan(memory.address, nbytes, owner=memory)
        return cls(name, span, memory.device, granule_nbytes=granule_nbytes, incarnation=incarnation)

    @classmethod
    def adopt(cls, name: str, memory: Buffer, *, granule_nbytes: int | None = None, incarnation: int) -> DeviceSegment:
        """Over GPU memory of this process: a tensor, anything with `__cuda_array_interface__`, a pointer."""
        span = device_span(memory)
        if span is None:
            raise InvalidInput(f"segment {name!r}: {type(memory).__name__} is not memory of a GPU")
        if span.readonly:
            raise InvalidInput(f"segment {name!r}: the memory is read-only")
        check_sizes(span.nbytes, granule_nbytes)
        device = driver().device_of(span.address)
        return cls(name, span, device, granule_nbytes=granule_nbytes, incarnation=incarnation)

    @property
    def span(self) -> DeviceSpan:
        """Return the memory; the returned object keeps it alive. Raise Unavailable after close()."""
        span = self._span
        if span is None:
            raise Unavailable(f"segment {self.name!r} is closed")
        return span

    @property
    def memory(self) -> memoryview:
        raise InvalidInput(f"segment {self.name!r} lies on {self.location} and cannot be shown; read_into() reads it")

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        """As RemoteSegment's, for the owner. Into main memory or GPU memory."""
        memories = [as_memory(buffer, writable=True) for buffer in buffers]
        check_bounds(offset, memories_nbytes(memories), self.nbytes)
        span = self.span
        mover_of(self.device).read(place(span.address + offset, memories), Deadline(timeout_s))

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        """As RemoteSegment's, for the owner."""
        memories = [as_memory(buffer, writable=False) for buffer in buffers]
        nbytes = memories_nbytes(memories)
        check_bounds(offset, nbytes, self.nbytes)
        fence, span = self.fence, self.span  # in this order: close() clears them in the other one
        if fence is not None:
            fence.admit(offset, nbytes, generation)
        mover_of(self.device).write(place(span.address + offset, memories), Deadline(timeout_s))
        if fence is not None:
            fence.confirm(offset, nbytes, generation)

    def close(self) -> None:
        """Idempotent."""
        self._span = None
        super().close()


def memories_nbytes(memories: Sequence[Memory]) -> int:
    return sum(memory.nbytes for memory in memories)


def place(address: int, memories: Sequence[Memory]) -> list[Placed]:
    """Each memory beside its part of the GPU's, one after the other from `address` on."""
    placed: list[Placed] = []
    for memory in memories:
        placed.append((address, memory))
        address += memory.nbytes
    return placed
