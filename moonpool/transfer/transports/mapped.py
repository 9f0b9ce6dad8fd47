"""Remote segments whose memory is mapped here: a transfer is a copy, and the writer itself checks the fence."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moonpool.base.clock import Deadline
from moonpool.base.errors import InvalidInput, MoonpoolError, PeerLost
from moonpool.transfer.memory.buffers import Buffer, DeviceSpan, as_bytes_view, copy_bytes, total_nbytes
from moonpool.transfer.memory.fence import merge_spans
from moonpool.transfer.memory.population import populate
from moonpool.transfer.memory.segment import Borrowed
from moonpool.transfer.transports.base import RemoteSegment, check_bounds, place_items
from moonpool.transfer.transports.cuda.copy import mover_of
from moonpool.transfer.transports.cuda.driver import driver

# Time for the owner to answer where the caller gave none: a connection was lost, and the owner is asked again.
_VIEW_TIMEOUT_S = 2.0
_MADV_POPULATE_WRITE = 23  # Python 3.11 and 3.12 do not name it
# A small write maps in so much around it: objects that are put together lie together.
_CHUNK_NBYTES = 256 * 1024
_LEAST_AHEAD_CHUNKS, _AHEAD_CHUNKS = 4, 256  # fewest and most that are mapped in ahead


class CopyGuard(Protocol):
    """Keeps memory page-locked within its context (cuda/pinning.py)."""

    def copying(self) -> AbstractContextManager[None]: ...


class MappedRemote(RemoteSegment):
    """Reads and writes the mapped memory of a segment. A subclass says where that memory is (_borrow)."""

    takes_gpu_memory = True
    guard: CopyGuard | None = None  # where the memory is page-locked
    _prefault: Prefault | None = None  # which pages of the memory are known to be mapped in

    @abstractmethod
    def _borrow(self, timeout_s: float) -> Borrowed:
        """Return the memory. Raise what base.py lists when the owner is gone or has withdrawn it."""

    def borrow(self, timeout_s: float) -> Borrowed:
        """Return the mapped memory and its fence; raise what base.py lists when the owner is gone."""
        return self._borrow(timeout_s)

    def still_maps(self, memory: memoryview) -> bool:
        """Return whether this is the memory of a living owner. Unmap the memory of an owner that has ended."""
        try:
            return self._borrow(_VIEW_TIMEOUT_S).memory is memory
        except MoonpoolError:
            return False

    # A MiB is copied in 70 us, and after it the processor's cache has forgotten this code: every line below is paid
    # for several times over.

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        if buffers and type(buffers[0]) is DeviceSpan:
            self._read_to_gpu(_one_after_the_other(offset, buffers), timeout_s)
            return
        views = [as_bytes_view(buffer, True) for buffer in buffers]
        check_bounds(offset, total_nbytes(views), self.nbytes)
        memory = self._borrow(timeout_s).memory
        for view in views:
            copy_bytes(view, memory[offset : offset + view.nbytes])
            offset += view.nbytes

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        if buffers and type(buffers[0]) is DeviceSpan:
            self._write_from_gpu(_one_after_the_other(offset, buffers), generation, timeout_s)
            return
        self.write_views(offset, [as_bytes_view(buffer, False) for buffer in buffers], generation, timeout_s)

    def write_views(self, offset: int, views: list[memoryview], generation: int, timeout_s: float) -> None:
        writer = self.writer(timeout_s)
        writer.write(offset, views, generation)
        writer.finish()

    def writer(self, timeout_s: float) -> MappedWriter:
        """Return a writer for many writes, each with its own generation; the owner is asked once."""
        borrowed = self._borrow(timeout_s)
        prefault = self._prefault
        if prefault is None or not prefault.is_of(borrowed.memory):
            prefault = self._prefault = Prefault(borrowed.memory)
        return MappedWriter(self, borrowed, prefault)

    def read_many(self, items: Sequence[tuple[int, Buffer]], *, timeout_s: float) -> None:
        if items and type(items[0][1]) is DeviceSpan:
            self._read_to_gpu(items, timeout_s)
            return
        placed = place_items(items, self.nbytes, writable=True)
        memory = self._borrow(timeout_s).memory
        for offset, view in placed:
            copy_bytes(view, memory[offset : offset + view.nbytes])

    def write_many(self, items: Sequence[tuple[int, Buffer]], *, generation: int, timeout_s: float) -> None:
        if items and type(items[0][1]) is DeviceSpan:
            self._write_from_gpu(items, generation, timeout_s)
            return
        placed = place_items(items, self.nbytes, writable=False)
        memory, fence = self._borrow(timeout_s)
        spans = merge_spans((offset, view.nbytes) for offset, view in placed) if fence is not None else []
        if fence is not None:
            fence.admit_all(spans, generation)
        for offset, view in placed:
            copy_bytes(memory[offset : offset + view.nbytes], view)
        if fence is not None:
            fence.confirm_all(spans, generation)
        self.check_owner_stayed(memory)

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        check_bounds(offset, nbytes, self.nbytes)
        return self._borrow(_VIEW_TIMEOUT_S).memory[offset : offset + nbytes].toreadonly()

    def _read_to_gpu(self, items: Sequence[tuple[int, Buffer]], timeout_s: float) -> None:
        deadline, spans = Deadline(timeout_s), _place_spans(items, self.nbytes)
        if spans:
            memory = self._borrow(timeout_s).memory
            placed = [(span.address, memory[offset : offset + span.nbytes]) for offset, span in spans]
            with self._guarded():
                mover_of(driver().device_of(spans[0][1].address)).write(placed, deadline)

    def _write_from_gpu(self, items: Sequence[tuple[int, Buffer]], generation: int, timeout_s: float) -> None:
        deadline, spans = Deadline(timeout_s), _place_spans(items, self.nbytes)
        if not spans:
            return
        memory, fence = self._borrow(timeout_s)
        touched = merge_spans((offset, span.nbytes) for offset, span in spans)
        if fence is not None:
            fence.admit_all(touched, generation)
        placed = [(span.address, memory[offset : offset + span.nbytes]) for offset, span in spans]
        with self._guarded():
            mover_of(driver().device_of(spans[0][1].address)).read(placed, deadline)
        if fence is not None:
            fence.confirm_all(touched, generation)
        self.check_owner_stayed(memory)

    def _guarded(self) -> AbstractContextManager[None]:
        return nullcontext() if self.guard is None else self.guard.copying()

    def check_owner_stayed(self, memory: memoryview) -> None:
        """Raise PeerLost when `memory` no longer belongs to the owner, so that writes to it are lost."""
        if self._borrow(_VIEW_TIMEOUT_S).memory is not memory:
            raise PeerLost("the segment's owner left during the write")


def _one_after_the_other(offset: int, buffers: Sequence[Buffer]) -> list[tuple[int, Buffer]]:
    items: list[tuple[int, Buffer]] = []
    for buffer in buffers:
        items.append((offset, buffer))
        offset += buffer.nbytes if isinstance(buffer, DeviceSpan) else 0  # another kind is refused below
    return items


def _place_spans(items: Sequence[tuple[int, Buffer]], segment_nbytes: int) -> list[tuple[int, DeviceSpan]]:
    """Return each item that is not empty; InvalidInput unless all are GPU memory and inside the segment."""
    placed: list[tuple[int, DeviceSpan]] = []
    for offset, span in items:
        if not isinstance(span, DeviceSpan):
            raise InvalidInput("main memory and GPU memory cannot be mixed in one call")
        check_bounds(offset, span.nbytes, segment_nbytes)
        if span.nbytes:
            placed.append((offset, span))
    return placed


class MappedWriter:
    """Writes into mapped memory, from one thread, soon. Nothing is certain before finish()."""

    __slots__ = ("_fence", "_memory", "_prefault", "_remote")

    def __init__(self, remote: MappedRemote, borrowed: Borrowed, prefault: Prefault) -> None:
        self._remote = remote
        self._prefault = prefault
        self._memory, self._fence = borrowed

    def write(self, offset: int, views: Sequence[memoryview], generation: int) -> None:
        """As RemoteSegment.write_from, of views of bytes."""
        nbytes = sum([view.nbytes for view in views])
        self._admit(offset, nbytes, generation)
        self._copy(offset, views)
        self._confirm(offset, nbytes, generation)

    def write_head_last(
        self,
        offset: int,
        head_nbytes: int,
        nbytes: int,
        fill: Callable[[memoryview], memoryview],
        generation: int,
    ) -> None:
        """As write() of a head and of `nbytes` behind it. `fill` writes these to the memory that it is given, and
        returns the head.
        """
        start, whole_nbytes = offset + head_nbytes, head_nbytes + nbytes
        self._admit(offset, whole_nbytes, generation)
        self._copy(offset, [fill(self._memory[start : start + nbytes])])
        self._confirm(offset, whole_nbytes, generation)

    def _admit(self, offset: int, nbytes: int, generation: int) -> None:
        check_bounds(offset, nbytes, self._memory.nbytes)
        if self._fence is not None:
            self._fence.admit(offset, nbytes, generation)
        self._prefault.before_write(self._memory, offset, nbytes)

    def _copy(self, at: int, views: Sequence[memoryview]) -> None:
        memory = self._memory
        for view in views:
            copy_bytes(memory[at : at + view.nbytes], view)
            at += view.nbytes

    def _confirm(self, offset: int, nbytes: int, generation: int) -> None:
        if self._fence is not None:
            self._fence.confirm(offset, nbytes, generation)

    def write_run(self, offset: int, parts: Sequence[bytes | memoryview], stamps: NDArray[np.uint64]) -> bool:
        """Objects that follow each other from a granule's start on, each of whole granules, by one copy; `stamps` has
        the generation of each granule. False when they are to be written one by one: one of them
        may be too old, or there is no fence.
        """
        fence, data = self._fence, b"".join(parts)
        check_bounds(offset, len(data), self._memory.nbytes)
        if fence is None or not fence.admit_run(offset, stamps):
            return False
        self._prefault.before_write(self._memory, offset, len(data))
        self._memory[offset : offset + len(data)] = data
        return fence.has_run(offset, stamps)

    def finish(self) -> None:
        """PeerLost when the owner left meanwhile: then all that was written is lost."""
        self._remote.check_owner_stayed(self._memory)


class Prefault:
    """Maps pages in before they are written: one system call for many pages, in place of a fault for each.

    The first write to a page of shared memory costs a fault in every process that maps it, ten times what copying the
    page costs. Only speed depends on this: kernels before 5.14 do not have the call.

    Space is given out from the lowest place on, so a writer mostly goes on behind what it has written. A thread maps
    that in meanwhile, as much as is mapped in already, up to _AHEAD_CHUNKS; it ends when it is done.

    For one mapping, of which `memory` is a part from its start on. Threads may race: a page may be mapped in twice.
    A Prefault does not keep the mapping alive.
    """

    def __init__(self, memory: memoryview) -> None:
        self._of = weakref.ref(memory)
        self._can = isinstance(memory.obj, mmap.mmap)
        self._done = bytearray(-(-memory.nbytes // _CHUNK_NBYTES))
        self._ahead_from = self._ahead_end = -1  # a write that ends in between starts the thread again
        self._helper: threading.Thread | None = None

    def is_of(self, memory: memoryview) -> bool:
        return self._of() is memory

    def before_write(self, memory: memoryview, offset: int, nbytes: int) -> None:
        first, end = offset // _CHUNK_NBYTES, (offset + nbytes - 1) // _CHUNK_NBYTES + 1
        missing = self._done.find(0, first, end)
        if missing >= 0 and self._can:
            last = self._done.rfind(0, first, end) + 1
            self._done[missing:last] = b"\1" * (last - missing)
            self._map_in(memory, missing * _CHUNK_NBYTES, last * _CHUNK_NBYTES)
            self._start_ahead(last)
        elif self._ahead_from <= end <= self._ahead_end:
            self._start_ahead(self._ahead_end)

    def _start_ahead(self, start: int) -> None:
        """Map in what follows chunk `start`, unless the thread runs or little was written so far."""
        num_chunks = min(self._done.count(1), _AHEAD_CHUNKS, len(self._done) - start)
        is_busy = self._helper is not None and self._helper.is_alive()
        if num_chunks < _LEAST_AHEAD_CHUNKS or is_busy or not self._can:
            return
        self._ahead_from, self._ahead_end = start + num_chunks // 2, start + num_chunks
        self._helper = threading.Thread(target=self._map_ahead, args=(start,), name="prefault", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            self._helper.start()

    def _map_ahead(self, start: int) -> None:
        for at in range(start, self._ahead_end):
            memory = self._of()
            if memory is None:
                return
            part = memory[at * _CHUNK_NBYTES : (at + 1) * _CHUNK_NBYTES]
            if not self._done[at] and populate(part):
                self._done[at] = 1
            del memory, part

    def _map_in(self, memory: memoryview, start: int, end: int) -> None:
        mapped = memory.obj
        assert isinstance(mapped, mmap.mmap)
        try:
            mapped.madvise(_MADV_POPULATE_WRITE, start, min(end, memory.nbytes) - start)
        except (OSError, ValueError):  # an old kernel, or memory that cannot be had now: the write itself will tell
            self._can = False
