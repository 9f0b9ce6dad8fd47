"""Puts memory on a NUMA node, without libnuma: one system call, before the pages are touched.

The node is preferred, not required: when it is full the kernel takes pages elsewhere. A strict binding would have it
kill the process instead, and slow memory is better than none.
"""

from __future__ import annotations

import ctypes
import mmap
import platform

import numpy as np

from moonpool.transfer.memory.buffers import Buffer, as_bytes_view
from moonpool.transfer.topology.discover import numa_nodes
from moonpool.transfer.topology.sysfs import Sysfs

_MBIND = {"x86_64": 237, "aarch64": 235}  # system call numbers
_MPOL_PREFERRED = 1
_BITS_PER_WORD = 8 * ctypes.sizeof(ctypes.c_ulong)


def bind_to_node(memory: Buffer, node: int) -> bool:
    """Asks that pages of `memory` not touched yet come from NUMA node `node`. True when the kernel agreed.

    False, and nothing changed, on a machine of one node, for a node it does not have, where the call is refused
    (containers often do) and on other processors. Part pages at either end are left alone. For shared memory the
    wish stays with the file and holds for every process that maps it.
    """
    nodes = [known.node for known in numa_nodes(Sysfs())]
    if len(nodes) < 2 or node not in nodes:
        return False
    return prefer_node(memory, node)


def bind_file_to_node(fd: int, nbytes: int, node: int) -> bool:
    """As bind_to_node, for the first `nbytes` of a memfd of at least that size, before its pages are allocated."""
    # Closed at once: the kernel keeps the wish with the file.
    with mmap.mmap(fd, nbytes, mmap.MAP_SHARED) as mapping:
        return bind_to_node(mapping, node)


def prefer_node(memory: Buffer, node: int) -> bool:
    """The system call alone; True when the kernel agreed."""
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
    """Start and size of the whole pages inside the range; the size is 0 when there is none."""
    first = -(-start // page_nbytes) * page_nbytes
    last = (start + nbytes) // page_nbytes * page_nbytes
    return first, max(0, last - first)


def node_mask(node: int) -> list[int]:
    """The set {node} as the kernel takes it: words of bits, lowest first."""
    words = [0] * (node // _BITS_PER_WORD + 1)
    words[-1] = 1 << node % _BITS_PER_WORD
    return words


def _address(memory: Buffer) -> tuple[int, int]:
    view = as_bytes_view(memory, writable=False)
    return np.frombuffer(view, dtype=np.uint8).ctypes.data, view.nbytes
