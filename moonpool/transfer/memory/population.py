"""Maps the pages of a mapping in before they are used.

The pages of a segment are allocated when it is made, but a process pays a fault for each page that it touches first: a
first write of 1 MiB takes twice as long as a later one. One system call maps many pages in for a tenth of that.

Only speed depends on this: kernels before 5.14 do not have the call, and memory may be short.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import threading
import time
from functools import cache
from pathlib import Path

from moonpool.base.units import format_nbytes
from moonpool.transfer.memory.buffers import address_of

_LOG = logging.getLogger(__name__)
_MADV_POPULATE_WRITE = 23  # Python 3.11 and 3.12 do not name it
_STEP_NBYTES = 16 * 1024 * 1024  # mapped in by one call, in a few ms
_REPORT_EVERY_S = 10.0
_HUGE_SHARED_MEMORY = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


class PagePopulation:
    """Maps all pages of `memory` in, which must be a mapping, on a thread of its own. The thread ends with close(), or
    when the pages are mapped in; then, or when the kernel refused, `is_over` is True.
    """

    def __init__(self, memory: memoryview, name: str) -> None:
        self._memory: memoryview | None = memory
        self._name = name
        self.nbytes = memory.nbytes
        self.done_nbytes = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="populate", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether the thread is over, within this time."""
        self._thread.join(timeout_s)
        return self.is_over

    def close(self) -> None:
        """Idempotent. Return when the memory is not in use any more."""
        self._closed = True
        self._thread.join()

    def _run(self) -> None:
        memory, self._memory = self._memory, None
        assert memory is not None, "runs once"
        begun_s = reported_s = time.monotonic()
        for start in range(0, memory.nbytes, _STEP_NBYTES):
            part = memory[start : start + _STEP_NBYTES]
            if self._closed or not populate(part):
                return
            self.done_nbytes += part.nbytes
            if time.monotonic() - reported_s > _REPORT_EVERY_S:
                reported_s = time.monotonic()
                done, total = format_nbytes(self.done_nbytes), format_nbytes(self.nbytes)
                _LOG.info("%s: %s of %s are mapped in", self._name, done, total)
        took_s = time.monotonic() - begun_s
        _LOG.info("%s: mapped %s in within %.1f s", self._name, format_nbytes(self.nbytes), took_s)


def populate(memory: memoryview) -> bool:
    """Map in the pages of a part of a mapping that begins on a page. Return whether the kernel did. Other threads run
    meanwhile, as they do not during mmap.madvise().
    """
    address, nbytes = ctypes.c_void_p(address_of(memory)), ctypes.c_size_t(memory.nbytes)
    return bool(_libc().madvise(address, nbytes, _MADV_POPULATE_WRITE) == 0)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def wants_advice(setting: str) -> bool:
    """Return whether the kernel takes huge pages for shared memory where it is advised to; `setting` is its text, with
    the value in effect in brackets.
    """
    return "[advise]" in setting


def advise_huge_pages(fd: int, nbytes: int) -> None:
    """Allocate the pages of a new memfd as huge pages, where the system's setting is "advise". Pages that this does not
    reach are allocated later as small ones: fallocate() does not see the advice, which belongs to the mapping.
    """
    try:
        setting = _HUGE_SHARED_MEMORY.read_text()
    except OSError:
        return
    if not wants_advice(setting):
        return
    with contextlib.suppress(OSError, ValueError), mmap.mmap(fd, nbytes, mmap.MAP_SHARED) as mapping:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        with memoryview(mapping) as whole:
            for start in range(0, nbytes, _STEP_NBYTES):
                with whole[start : start + _STEP_NBYTES] as part:
                    if not populate(part):
                        return
