"""Pages mapped in before they are written: one system call for many, in place of a fault for every page.

The first write to a page of shared memory costs a fault in every process that maps it, ten times what copying the
page costs. Only speed depends on this: where the kernel does not know the call (before 5.14), faults it is.
"""

from __future__ import annotations

import mmap
import weakref

_MADV_POPULATE_WRITE = 23  # Python 3.11 and 3.12 do not name it
# A small write maps in so much around it: objects that are put together lie together.
_CHUNK_NBYTES = 256 * 1024


class Prefault:
    """For one mapping, of which `memory` is a part from its start on. Threads may race: a page is mapped in once.

    It remembers which pages are there, and does not keep the mapping.
    """

    def __init__(self, memory: memoryview) -> None:
        self._of = weakref.ref(memory)
        self._can = isinstance(memory.obj, mmap.mmap)
        self._done = bytearray(-(-memory.nbytes // _CHUNK_NBYTES))

    def is_of(self, memory: memoryview) -> bool:
        return self._of() is memory

    def before_write(self, memory: memoryview, offset: int, nbytes: int) -> None:
        first, end = offset // _CHUNK_NBYTES, (offset + nbytes - 1) // _CHUNK_NBYTES + 1
        missing = self._done.find(0, first, end)
        if missing >= 0 and self._can:
            last = self._done.rfind(0, first, end) + 1
            self._done[missing:last] = b"\1" * (last - missing)
            self._map_in(memory, missing * _CHUNK_NBYTES, last * _CHUNK_NBYTES)

    def _map_in(self, memory: memoryview, start: int, end: int) -> None:
        mapped = memory.obj
        assert isinstance(mapped, mmap.mmap)
        try:
            mapped.madvise(_MADV_POPULATE_WRITE, start, min(end, memory.nbytes) - start)
        except (OSError, ValueError):  # an old kernel, or memory that cannot be had now: the write itself will tell
            self._can = False
