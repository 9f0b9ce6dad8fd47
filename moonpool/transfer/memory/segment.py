"""Memory that a process offers to others.

Ownership: a Segment owns its mapping and its descriptor; `memory` and everything cut from it are borrowed. close()
gives the descriptor back at once and the mapping as soon as the last borrowed view is gone, so a view never turns
into a wild pointer. Serving a segment borrows it: withdraw it from the engine before closing it.

Layout of a memfd (version LAYOUT_VERSION): the data from byte 0; from the next page on 4 KiB for the generations that
the fence refuses; then the fence table, one u64 per granule.

Memory can be put on a NUMA node, by one system call before its pages are touched (libnuma is not needed). The node is
preferred, not required: when it is full the kernel takes pages elsewhere. With a strict binding the kernel would kill
the process instead, and slow memory is better than none.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
from typing import ClassVar, NamedTuple, Self

import numpy as np

from moonpool.base.errors import InvalidInput, NoSpace, ProtocolError, Unavailable
from moonpool.base.units import format_nbytes
from moonpool.transfer.memory.buffers import Buffer, as_bytes_view
from moonpool.transfer.memory.fence import GENERATION_NBYTES, NUM_REFUSED_CELLS, Fence, make_fence, num_granules
from moonpool.transfer.memory.location import Location, available_memory_nbytes, parse_location
from moonpool.transfer.memory.population import PagePopulation, advise_huge_pages
from moonpool.transfer.topology.discover import Sysfs, numa_nodes

MAX_NAME_NBYTES = 255
LAYOUT_VERSION = 2
_REFUSED_NBYTES = 4096
_MBIND = {"x86_64": 237, "aarch64": 235}  # system call numbers
_MPOL_PREFERRED = 1
_BITS_PER_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)


class Borrowed(NamedTuple):
    """A segment's memory and fence, held together."""

    memory: memoryview
    fence: Fence | None


class Segment:
    """A named span of memory. Make one with allocate(), over() or from_fd()."""

    in_memory: ClassVar[bool] = True  # False: in a file, which only the file transport can serve

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
        self.population: PagePopulation | None = None  # see populate()
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
        """Make a segment of zeroed shared memory (a memfd). Every page is allocated now, on `numa_node` if possible.

        NoSpace when the machine has not enough left: without this check the kernel would kill the process.
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
            os.ftruncate(fd, total)
            if numa_node is not None:
                bind_file_to_node(fd, total, numa_node)
            advise_huge_pages(fd, total)
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
        """Map a memfd with the layout above. The segment owns the descriptor then, unless this raises."""
        check_sizes(nbytes, granule_nbytes)
        total = file_nbytes(nbytes, granule_nbytes)
        if os.fstat(fd).st_size < total:
            # Touching pages beyond the file's end would kill the process.
            raise ProtocolError(f"the memory passed for segment {name!r} is smaller than {total} bytes")
        mapping = mmap.mmap(fd, total, mmap.MAP_SHARED)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(mapping)
        fence = None
        if granule_nbytes is not None:
            start, count = fence_offset(nbytes), num_granules(nbytes, granule_nbytes)
            refused = np.frombuffer(whole, dtype=np.uint64, count=NUM_REFUSED_CELLS, offset=start)
            table = np.frombuffer(whole, dtype=np.uint64, count=count, offset=start + _REFUSED_NBYTES)
            fence = Fence(table, granule_nbytes, refused)
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
        """Make a segment of any writable, contiguous memory of this process, borrowed until close(). It has no
        descriptor, so other processes reach it by tcp only.
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
        """Return memory and fence, usable even if the segment is closed meanwhile; Unavailable after close()."""
        fence = self.fence  # before `memory`: close() clears them in the other order
        return Borrowed(self.memory, fence)

    def populate(self) -> PagePopulation:
        """Begin to map all pages in, so that the first use of each takes no longer than later ones; the result tells
        how far it is. For segments made by allocate(). Memory that renew() takes later is mapped in, too.
        """
        self.population = self.population or PagePopulation(self.memory, self.name)
        return self.population

    def renew(self) -> None:
        """Replace the memory by new memory of the same size, zeroed, with all generations 0. Processes that have mapped
        the old memory keep it. For segments made by allocate(), while they are neither served nor borrowed here.

        NoSpace when the machine has not enough left; then the segment has no memory until a later call succeeds.
        """
        is_populated = self.population is not None
        self.close()  # first: there may be no room for both
        made = Segment.allocate(
            self.name,
            self.nbytes,
            granule_nbytes=self._granule_nbytes,
            incarnation=self.incarnation,
            numa_node=parse_location(self.location).index,
        )
        self.fence, self.fd, self._memory = made.fence, made.fd, made._memory
        if is_populated:
            self.populate()

    def close(self) -> None:
        """Idempotent. See the module's docstring for what lives on."""
        population, self.population = self.population, None
        if population is not None:
            population.close()
        # Not released: every view keeps the mapping, and the end of the last view unmaps it.
        self._memory = None
        self.fence = None
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fence_offset(nbytes: int) -> int:
    """Return where the fence begins in the memfd: at the first page after the data."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def file_nbytes(nbytes: int, granule_nbytes: int | None) -> int:
    """Return the size of the memfd: data, and the fence if there is one."""
    if granule_nbytes is None:
        return nbytes
    return fence_offset(nbytes) + _REFUSED_NBYTES + num_granules(nbytes, granule_nbytes) * GENERATION_NBYTES


def _check_name(name: str) -> None:
    if not 0 < len(name.encode()) <= MAX_NAME_NBYTES or not name.isprintable():
        raise InvalidInput(f"a segment's name has 1 to {MAX_NAME_NBYTES} printable bytes, {name!r} does not")


def check_sizes(nbytes: int, granule_nbytes: int | None) -> None:
    if nbytes <= 0:
        raise InvalidInput(f"a segment needs at least one byte, not {nbytes}")
    if granule_nbytes is not None and granule_nbytes <= 0:
        raise InvalidInput(f"a granule needs at least one byte, not {granule_nbytes}")


def _take_pages(fd: int, nbytes: int, name: str) -> None:
    """Allocate all pages and seal the size, so that the file cannot shrink under a process that maps it."""
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise NoSpace(f"the kernel has no {format_nbytes(nbytes)} of memory for segment {name!r}") from error
        raise
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)


def bind_to_node(memory: Buffer, node: int) -> bool:
    """Ask the kernel to take pages of `memory` that are not touched yet from NUMA node `node`. Return whether the
    kernel agreed.

    It does not agree on a machine of one node, for a node that does not exist, where the call is forbidden (often in
    containers) and on other processors. Partial pages at either end are left alone. For shared memory the preference
    stays with the file and holds for every process that maps it.
    """
    nodes = [known.node for known in numa_nodes(Sysfs())]
    if len(nodes) < 2 or node not in nodes:
        return False
    return prefer_node(memory, node)


def bind_file_to_node(fd: int, nbytes: int, node: int) -> bool:
    """As bind_to_node(), for the first `nbytes` of a memfd, before its pages are allocated."""
    # Unmapped at once: the kernel keeps the preference with the file.
    with mmap.mmap(fd, nbytes, mmap.MAP_SHARED) as mapping:
        return bind_to_node(mapping, node)


def prefer_node(memory: Buffer, node: int) -> bool:
    """Make the system call; return whether the kernel agreed."""
    number = _MBIND.get(platform.machine())
    start, nbytes = whole_pages(*_address(memory), mmap.PAGESIZE)
    if number is None or nbytes == 0:
        return False
    mask = node_mask(node)
    words = (ctypes.c_ulong * len(mask))(*mask)
    arguments = (start, nbytes, _MPOL_PREFERRED, ctypes.addressof(words), len(mask) * _BITS_PER_WORD + 1, 0)
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    return bool(syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)) == 0)


def whole_pages(start: int, nbytes: int, page_nbytes: int) -> tuple[int, int]:
    """Return start and size of the whole pages inside the range; the size is 0 when there is none."""
    first = -(-start // page_nbytes) * page_nbytes
    last = (start + nbytes) // page_nbytes * page_nbytes
    return first, max(0, last - first)


def node_mask(node: int) -> list[int]:
    """Return the set {node} in the kernel's format: words of bits, lowest first."""
    words = [0] * (node // _BITS_PER_WORD + 1)
    words[-1] = 1 << node % _BITS_PER_WORD
    return words


def _address(memory: Buffer) -> tuple[int, int]:
    view = as_bytes_view(memory, writable=False)
    return np.frombuffer(view, dtype=np.uint8).ctypes.data, view.nbytes
