"""Pages mapped in before they are written: one system call for some MiB, in place of a fault for every page.

The first write to a page of shared memory costs a fault in every process that maps it, ten times what copying the
page costs. Only speed depends on this: where the kernel does not know the call (before 5.14), faults it is.
"""

from __future__ import annotations

import mmap
import weakref

_MADV_POPULATE_WRITE = 23  # Python 3.11 and 3.12 do not name it
_CHUNK_NBYTES = 4 * 1024 * 1024
# Smaller writes touch few pages, and most of what they touch was touched before.
_LEAST_NBYTES = 64 * 1024


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
        if nbytes < _LEAST_NBYTES or not self._can:
            return
        done = self._done
        for chunk in range(offset // _CHUNK_NBYTES, (offset + nbytes - 1) // _CHUNK_NBYTES + 1):
            if not done[chunk]:
                done[chunk] = 1
                self._map_in(memory, chunk * _CHUNK_NBYTES)

    def _map_in(self, memory: memoryview, start: int) -> None:
        mapped = memory.obj
        assert isinstance(mapped, mmap.mmap)
        try:
            mapped.madvise(_MADV_POPULATE_WRITE, start, min(_CHUNK_NBYTES, memory.nbytes - start))
        except (OSError, ValueError):  # an old kernel, or memory that cannot be had now: the write itself will tell
            self._can = False
