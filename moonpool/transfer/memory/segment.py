"""Memory that a process offers to others, and the fence that keeps late writers out of it.

Ownership: a Segment owns its mapping and its descriptor; `memory` and everything cut from it are borrowed. close()
gives the descriptor back at once and the mapping as soon as the last borrowed view is gone, so a view never turns
into a wild pointer. Serving a segment borrows it: withdraw it from the engine before closing it.

Layout of a memfd: the data from byte 0, then, from the next page on, the fence table (one u64 per granule).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import InvalidInput, NoSpace, ProtocolError, StaleGeneration, Unavailable
from moonpool.base.units import format_nbytes
from moonpool.transfer.host import available_memory_nbytes
from moonpool.transfer.memory.buffers import Buffer, as_bytes_view
from moonpool.transfer.memory.location import Location, parse_location
from moonpool.transfer.memory.numa import bind_file_to_node

MAX_NAME_NBYTES = 255
_GENERATION_NBYTES = 8
_MAX_GENERATION = 2**64 - 1
_FEW = 8  # granules, up to which numpy takes longer than a loop


class Fence:
    """One generation per granule of a segment. A write is admitted when no granule it touches is newer.

    Threads of one process see check and stamp as one step. Between processes that map the same table they are
    two, so a writer calls confirm() when its bytes are in place: two writers that raced cannot both succeed
    unseen, and the loser's bytes are never announced. Space is handed out in whole granules, else neighbours of
    different generations would keep each other out.
    """

    def __init__(self, table: NDArray[np.uint64], granule_nbytes: int) -> None:
        self.granule_nbytes = granule_nbytes
        self._table = table
        self._cells = table.data  # the same memory: one number is had ten times faster than from an array
        self._raw = self._cells.cast(
            "B"
        )  # and once more, as bytes: comparing and setting many alike is ten times faster
        self._lock = threading.Lock()
        self.limit = _MAX_GENERATION  # no write of a higher one is admitted by this process

    def admit(self, offset: int, nbytes: int, generation: int) -> None:
        """Stamps the touched granules with `generation`; StaleGeneration, stamping none, if one is newer or the
        generation is above the limit: one that was never given out would keep all later writers out for ever.
        """
        granules = self._few_granules(offset, nbytes, generation)
        if granules is None:
            self.admit_all([(offset, nbytes)], generation)
            return
        self._check_limit(offset, generation)
        cells = self._cells
        with self._lock:
            for at in granules:
                if cells[at] > generation:
                    raise self._stale(offset, cells[at], generation)
            for at in granules:
                cells[at] = generation

    def admit_all(self, spans: Sequence[tuple[int, int]], generation: int) -> None:
        """admit() of each (offset, nbytes), all or none."""
        touched = self._touched(spans, generation)
        if touched:
            self._check_limit(touched[0][0], generation)
        with self._lock:
            for offset, first, end in touched:
                newest = self._newest(first, end)
                if newest > generation:
                    raise self._stale(offset, newest, generation)
            self._set(touched, generation)

    def confirm(self, offset: int, nbytes: int, generation: int) -> None:
        """StaleGeneration unless every touched granule still carries `generation`."""
        granules = self._few_granules(offset, nbytes, generation)
        if granules is None:
            self.confirm_all([(offset, nbytes)], generation)
            return
        cells = self._cells
        for at in granules:
            if cells[at] != generation:
                raise self._stale(offset, cells[at], generation)

    def confirm_all(self, spans: Sequence[tuple[int, int]], generation: int) -> None:
        for offset, first, end in self._touched(spans, generation):
            raw = self._raw[first * _GENERATION_NBYTES : end * _GENERATION_NBYTES]
            if bytes(raw) != _repeated(generation, end - first):
                raise self._stale(offset, self._newest(first, end), generation)

    def admit_run(self, offset: int, stamps: Sequence[tuple[int, int]]) -> bool:
        """admit() of spans that follow each other from a granule's start on: (generation, how many granules) of each.
        False, stamping none, when one is too old; or may be: they are not looked at one by one.
        """
        raw = self._run(offset, stamps)
        with self._lock:
            first = offset // self.granule_nbytes
            if self._newest(first, first + raw.nbytes // _GENERATION_NBYTES) > min(stamps)[0]:
                return False
            raw[:] = _stamped(stamps)
        return True

    def has_run(self, offset: int, stamps: Sequence[tuple[int, int]]) -> bool:
        """Whether confirm() of each of them would pass."""
        return bytes(self._run(offset, stamps)) == _stamped(stamps)

    def _run(self, offset: int, stamps: Sequence[tuple[int, int]]) -> memoryview:
        first = offset // self.granule_nbytes
        count = sum([granules for _, granules in stamps])
        return self._raw[first * _GENERATION_NBYTES : (first + count) * _GENERATION_NBYTES]

    def stamp(self, offset: int, nbytes: int, generation: int) -> None:
        """The owner's word: the touched granules belong to `generation` from now on, whatever they had."""
        touched = self._touched([(offset, nbytes)], generation)
        with self._lock:
            self._set(touched, generation)

    def generation_at(self, offset: int) -> int:
        return self._cells[offset // self.granule_nbytes]

    def spans_above(self, generation: int) -> list[tuple[int, int]]:
        """(offset, nbytes) of all space stamped with a greater generation, in whole granules; neighbours are merged."""
        if generation >= _MAX_GENERATION:
            return []
        newer = np.concatenate(([False], self._table > np.uint64(generation), [False]))
        edges = np.flatnonzero(newer[1:] != newer[:-1]).reshape(-1, 2) * self.granule_nbytes
        return [(start, end - start) for start, end in edges.tolist()]

    def stamps_above(self, generation: int) -> list[tuple[int, int, int]]:
        """(offset, nbytes, stamp) of all space stamped with a greater generation, in whole granules; neighbours with
        the same stamp are merged.
        """
        if generation >= _MAX_GENERATION:
            return []
        at = np.flatnonzero(self._table > np.uint64(generation))
        stamps = self._table[at]
        starts = np.flatnonzero(np.append(True, (np.diff(at) != 1) | (stamps[1:] != stamps[:-1]))[: len(at)])
        counts = np.diff(np.append(starts, len(at)))
        size = self.granule_nbytes
        runs = zip(at[starts].tolist(), counts.tolist(), stamps[starts].tolist(), strict=True)
        return [(first * size, count * size, stamp) for first, count, stamp in runs]

    def restamp(self, offset: int, nbytes: int, found: int, generation: int) -> None:
        """The owner's word, for the touched granules that still carry the stamp `found`."""
        with self._lock:
            for _, first, end in self._touched([(offset, nbytes)], generation):
                cells = self._table[first:end]
                cells[cells == np.uint64(found)] = generation

    def _check_limit(self, offset: int, generation: int) -> None:
        if generation > self.limit:
            raise StaleGeneration(
                f"a write of generation {generation} at offset {offset} is refused: no generation above {self.limit} "
                "was given out"
            )

    def _few_granules(self, offset: int, nbytes: int, generation: int) -> range | None:
        """The granules of a small span, which are quicker to go through one by one; None for others."""
        if not 0 < nbytes <= _FEW * self.granule_nbytes or not 0 <= generation <= _MAX_GENERATION:
            return None
        return range(offset // self.granule_nbytes, (offset + nbytes - 1) // self.granule_nbytes + 1)

    def _touched(self, spans: Sequence[tuple[int, int]], generation: int) -> list[tuple[int, int, int]]:
        """(offset, first granule, one past the last) of each span that is not empty."""
        if not 0 <= generation <= _MAX_GENERATION:
            raise InvalidInput(f"generation {generation} is not an unsigned 64-bit number")
        size = self.granule_nbytes
        return [(offset, offset // size, (offset + nbytes - 1) // size + 1) for offset, nbytes in spans if nbytes]

    def _newest(self, first: int, end: int) -> int:
        generation = self._cells[first]
        raw = self._raw[first * _GENERATION_NBYTES : end * _GENERATION_NBYTES]
        if bytes(raw) == _repeated(generation, end - first):  # space is used again as it was, or has never been used
            return generation
        return int(self._table[first:end].max())

    def _set(self, touched: Sequence[tuple[int, int, int]], generation: int) -> None:
        for _, first, end in touched:
            self._raw[first * _GENERATION_NBYTES : end * _GENERATION_NBYTES] = _repeated(generation, end - first)

    @staticmethod
    def _stale(offset: int, found: int, generation: int) -> StaleGeneration:
        return StaleGeneration(f"space at offset {offset} belongs to generation {found}, the write is of {generation}")


def _repeated(generation: int, count: int) -> bytes:
    """So many cells of the table that all have this generation."""
    return generation.to_bytes(_GENERATION_NBYTES, sys.byteorder) * count


def _stamped(stamps: Sequence[tuple[int, int]]) -> bytes:
    return b"".join([_repeated(generation, count) for generation, count in stamps])


class Borrowed(NamedTuple):
    """A segment's memory and fence, held together."""

    memory: memoryview
    fence: Fence | None


class Segment:
    """A named span of memory. Make one with allocate(), over() or from_fd()."""

    in_memory: ClassVar[bool] = True  # False: it lies in a file, and only the transport made for that can serve it

    def __init__(
        self,
        name: str,
        memory: memoryview,
        *,
        incarnation: int,
        fence: Fence | None = None,
        fd: int | None = None,
        location: str = "cpu",
    ) -> None:
        _check_name(name)
        self.name = name
        self.nbytes = memory.nbytes
        self.incarnation = incarnation
        self.fence = fence
        self.fd = fd
        self.location = location  # see location.py
        self._memory: memoryview | None = memory
        self._granule_nbytes = None if fence is None else fence.granule_nbytes

    @classmethod
    def allocate(
        cls,
        name: str,
        nbytes: int,
        *,
        granule_nbytes: int | None = None,
        incarnation: int,
        numa_node: int | None = None,
    ) -> Segment:
        """Zeroed shared memory (a memfd), every page taken now, on NUMA node `numa_node` where that can be had.

        NoSpace when the machine has not that much left: without this check the kernel would kill the process.
        """
        _check_name(name)
        check_sizes(nbytes, granule_nbytes)
        total = file_nbytes(nbytes, granule_nbytes)
        available = available_memory_nbytes()
        if total > available:
            raise NoSpace(
                f"segment {name!r} wants {format_nbytes(total)} of memory and only {format_nbytes(available)} "
                "are available; ask for less or free some"
            )
        fd = os.memfd_create(f"moonpool-{name}"[:60], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            if numa_node is not None:
                os.ftruncate(fd, total)
                bind_file_to_node(fd, total, numa_node)
            _take_pages(fd, total, name)
            made = cls.from_fd(name, fd, nbytes, granule_nbytes=granule_nbytes, incarnation=incarnation)
            made.location = str(Location("cpu", numa_node))
            return made
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def from_fd(
        cls, name: str, fd: int, nbytes: int, *, granule_nbytes: int | None = None, incarnation: int
    ) -> Segment:
        """Maps a memfd laid out as above. Takes the descriptor over when it returns; leaves it when it raises."""
        check_sizes(nbytes, granule_nbytes)
        total = file_nbytes(nbytes, granule_nbytes)
        if os.fstat(fd).st_size < total:
            # Touching pages beyond the file's end would kill the process.
            raise ProtocolError(f"the memory passed for segment {name!r} is smaller than {total} bytes")
        whole = memoryview(mmap.mmap(fd, total, mmap.MAP_SHARED))
        fence = None
        if granule_nbytes is not None:
            start, count = fence_offset(nbytes), num_granules(nbytes, granule_nbytes)
            fence = Fence(np.frombuffer(whole, dtype=np.uint64, count=count, offset=start), granule_nbytes)
        return cls(name, whole[:nbytes], incarnation=incarnation, fence=fence, fd=fd)

    @classmethod
    def over(
        cls,
        name: str,
        buffer: Buffer,
        *,
        granule_nbytes: int | None = None,
        incarnation: int,
        location: str = "cpu",
    ) -> Segment:
        """Any writable, contiguous memory of this process, borrowed until close(). It has no descriptor, so
        other processes reach it by tcp only.
        """
        memory = as_bytes_view(buffer, writable=True)
        check_sizes(memory.nbytes, granule_nbytes)
        fence = make_fence(memory.nbytes, granule_nbytes)
        return cls(name, memory[:], incarnation=incarnation, fence=fence, location=location)

    @property
    def memory(self) -> memoryview:
        """The data, writable, format "B". Borrowed. Unavailable after close()."""
        memory = self._memory
        if memory is None:
            raise Unavailable(f"segment {self.name!r} is closed")
        return memory

    def borrow(self) -> Borrowed:
        """Memory and fence together, usable even if the segment is closed meanwhile; Unavailable after close()."""
        fence = self.fence  # before `memory`: close() clears them in the other order
        return Borrowed(self.memory, fence)

    def renew(self) -> None:
        """Other memory in place of this one, of the same size, zeroed, its generations 0. Who has the old one mapped
        keeps that for himself. For segments made by allocate(), while nobody serves them or borrows from them here.

        NoSpace when the machine has not that much left; then there is none until a later call succeeds.
        """
        self.close()  # first, for it is as much once more
        made = Segment.allocate(
            self.name,
            self.nbytes,
            granule_nbytes=self._granule_nbytes,
            incarnation=self.incarnation,
            numa_node=parse_location(self.location).index,
        )
        self.fence, self.fd, self._memory = made.fence, made.fd, made._memory

    def close(self) -> None:
        """Idempotent. See the module's docstring for what lives on."""
        # Not released, only let go: whoever still holds a view keeps the mapping, and the last one to go unmaps it.
        self._memory = None
        self.fence = None
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_fence(nbytes: int, granule_nbytes: int | None) -> Fence | None:
    """A fence in this process's own memory, all generations 0; None for segments without."""
    if granule_nbytes is None:
        return None
    return Fence(np.zeros(num_granules(nbytes, granule_nbytes), dtype=np.uint64), granule_nbytes)


def num_granules(nbytes: int, granule_nbytes: int) -> int:
    return -(-nbytes // granule_nbytes)


def fence_offset(nbytes: int) -> int:
    """Where in the memfd the fence table begins: the first page after the data."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def file_nbytes(nbytes: int, granule_nbytes: int | None) -> int:
    """Size of the memfd: data, and the fence table if there is one."""
    if granule_nbytes is None:
        return nbytes
    return fence_offset(nbytes) + num_granules(nbytes, granule_nbytes) * _GENERATION_NBYTES


def _check_name(name: str) -> None:
    if not 0 < len(name.encode()) <= MAX_NAME_NBYTES or not name.isprintable():
        raise InvalidInput(f"a segment's name has 1 to {MAX_NAME_NBYTES} printable bytes, {name!r} does not")


def check_sizes(nbytes: int, granule_nbytes: int | None) -> None:
    if nbytes <= 0:
        raise InvalidInput(f"a segment needs at least one byte, not {nbytes}")
    if granule_nbytes is not None and granule_nbytes <= 0:
        raise InvalidInput(f"a granule needs at least one byte, not {granule_nbytes}")


def _take_pages(fd: int, nbytes: int, name: str) -> None:
    """Allocates all pages and fixes the size, so that no process that maps it can be hit by a shrinking file."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise NoSpace(f"the kernel has no {format_nbytes(nbytes)} of memory for segment {name!r}") from error
        raise
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
