"""Memory on a NUMA node: the arithmetic, and the system call as far as this machine allows it."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform

import numpy as np
import pytest

from moonpool.transfer import Segment
from moonpool.transfer.memory.segment import bind_file_to_node, bind_to_node, node_mask, prefer_node, whole_pages
from moonpool.transfer.topology import Sysfs
from moonpool.transfer.topology.discover import numa_nodes

_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_MPOL_PREFERRED, _MPOL_F_ADDR = 1, 2
NODES = [node.node for node in numa_nodes(Sysfs())]


def policy_of(memory: mmap.mmap) -> tuple[int, int]:
    """The kernel's word on a mapping: policy and first word of its node set."""
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * 64)()
    address = ctypes.c_ulong(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    number = _GET_MEMPOLICY[platform.machine()]
    arguments = (ctypes.byref(mode), mask, ctypes.c_ulong(64 * 64), address, ctypes.c_ulong(_MPOL_F_ADDR))
    assert syscall(ctypes.c_long(number), *arguments) == 0
    return mode.value, mask[0]


def test_whole_pages() -> None:
    assert whole_pages(4096, 8192, 4096) == (4096, 8192)
    assert whole_pages(4097, 8192, 4096) == (8192, 4096)
    assert whole_pages(1, 4095, 4096)[1] == 0
    assert whole_pages(0, 0, 4096)[1] == 0


def test_node_mask() -> None:
    assert node_mask(0) == [1]
    assert node_mask(63) == [1 << 63]
    assert node_mask(65) == [0, 2]


def test_a_wish_stays_with_the_file() -> None:
    fd = os.memfd_create("moonpool-test")
    try:
        os.ftruncate(fd, 4 * mmap.PAGESIZE)
        with mmap.mmap(fd, 4 * mmap.PAGESIZE) as first:
            if not prefer_node(first, NODES[0]):
                pytest.skip("this kernel or container refuses mbind")
        second = mmap.mmap(fd, 4 * mmap.PAGESIZE)
        assert policy_of(second) == (_MPOL_PREFERRED, 1 << NODES[0])
    finally:
        os.close(fd)


def test_a_node_that_is_not_there_is_false() -> None:
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    assert not bind_to_node(memory, 999)
    assert not prefer_node(memory, 999)
    assert not prefer_node(bytearray(16), 0)  # less than a page


def test_binding_is_a_choice_only_with_several_nodes() -> None:
    fd = os.memfd_create("moonpool-test")
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        bound = bind_file_to_node(fd, mmap.PAGESIZE, NODES[0])
    finally:
        os.close(fd)
    assert not bound or len(NODES) > 1


@pytest.mark.parametrize("node", [NODES[-1], 999])
def test_a_segment_is_allocated_whatever_node_is_asked_for(node: int) -> None:
    with Segment.allocate("numa", 10_000, granule_nbytes=4096, incarnation=1, numa_node=node) as segment:
        segment.memory[:3] = b"abc"
        assert (bytes(segment.memory[:4]), segment.nbytes) == (b"abc\0", 10_000)
