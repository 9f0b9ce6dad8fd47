"""Main memory for callers of Mooncake's API: its allocators, and the NUMA node of a thread.

The memory is mapped in whole pages and zeroed. Register it with a store before its calls use it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading

import numpy as np

from moonpool.transfer.topology.discover import Sysfs, numa_nodes

_LOG = logging.getLogger(__name__)
_ALIGN_NBYTES = 64  # a cache line


class MooncakeHostMemAllocator:
    """Memory by address. Thread-safe. Memory that is not freed stays mapped until this object is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[int, mmap.mmap] = {}

    def alloc(self, size: int) -> int:
        """Return the address of `size` bytes; 0 when no memory is left."""
        try:
            mapped = mmap.mmap(-1, size)
        except (ValueError, OverflowError, OSError) as error:
            _LOG.warning("alloc of %d bytes: %s", size, error)
            return 0
        address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
        with self._lock:
            self._mapped[address] = mapped
        return address

    def free(self, ptr: int) -> int:
        """Unmap memory that alloc() returned. Return 0, or -1 when there is none at that address."""
        with self._lock:
            mapped = self._mapped.pop(ptr, None)
        if mapped is None:
            return -1
        mapped.close()
        return 0


class MemoryPool:
    """Memory that is given out piece by piece, and back only as a whole. Thread-safe."""

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes)
        self.nbytes = nbytes
        self.address = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        self._lock = threading.Lock()
        self._used = 0

    def alloc(self, nbytes: int) -> int:
        """Return the address of `nbytes` bytes; 0 when there is no room for them."""
        with self._lock:
            at = -(-self._used // _ALIGN_NBYTES) * _ALIGN_NBYTES
            if nbytes <= 0 or at + nbytes > self.nbytes:
                return 0
            self._used = at + nbytes
            return self.address + at


def bind_to_numa_node(node: int) -> None:
    """Run this thread on the CPUs of a NUMA node. The kernel puts memory that the thread touches first there too. A
    node that does not exist changes nothing and is logged.
    """
    cpus = next((each.cpus for each in numa_nodes(Sysfs()) if each.node == node), ())
    if not cpus:
        _LOG.warning("this machine has no NUMA node %d with CPUs", node)
        return
    os.sched_setaffinity(0, cpus)


_shared = MooncakeHostMemAllocator()
_AllocFunction = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
_FreeFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_alloc_function = _AllocFunction(_shared.alloc)
_free_function = _FreeFunction(lambda ptr: _shared.free(ptr or 0) and None)


def get_alloc_func_addr() -> int:
    """Return the address of a C function `void *alloc(size_t)` for libraries that take an allocator."""
    return ctypes.cast(_alloc_function, ctypes.c_void_p).value or 0


def get_free_func_addr() -> int:
    """Return the address of a C function `void free(void *)` for what get_alloc_func_addr() allocates."""
    return ctypes.cast(_free_function, ctypes.c_void_p).value or 0
