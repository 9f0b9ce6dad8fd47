"""Pointers that may be followed: mapped for reading and writing, registered, and nothing beside them."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.registered_memory import RegisteredMemory, is_mapped

MAPS = """\
1000-3000 rw-p 00000000 00:00 0
3000-4000 rw-s 00000000 00:01 2052 /dev/zero (deleted)
4000-5000 r--p 00000000 00:00 0 /lib/libc.so
7000-9000 ---p 00000000 00:00 0
9000-a000 rw-p 00000000 00:00 0 [heap]
"""


@pytest.mark.parametrize(
    ("address", "nbytes", "expected"),
    [
        (0x1000, 0x3000, True),  # across two mappings
        (0x2FFF, 2, True),
        (0x3FFF, 1, True),
        (0x3FFF, 2, False),  # into one that is read-only
        (0x4000, 1, False),
        (0x5000, 1, False),  # nothing there
        (0x0FFF, 2, False),
        (0x7800, 16, False),  # reserved, as memory of a GPU is
        (0x8FFF, 2, False),
        (0x9000, 0x1000, True),
        (0x9000, 0x1001, False),
    ],
)
def test_sees_what_the_process_may_write(address: int, nbytes: int, expected: bool) -> None:
    assert is_mapped(address, nbytes, MAPS) is expected


def test_read_only_memory_is_refused() -> None:
    with mmap.mmap(-1, 4096, prot=mmap.PROT_READ) as mapping:
        address = int(np.frombuffer(mapping, np.uint8).ctypes.data)
        with pytest.raises(InvalidInput):
            RegisteredMemory().register(address, 4096)


@given(
    spans=st.lists(st.tuples(st.integers(0, 999), st.integers(1, 300)), max_size=12),
    asked=st.lists(st.tuples(st.integers(-50, 1050), st.integers(0, 200)), max_size=20),
)
def test_gives_out_exactly_what_is_registered(spans: list[tuple[int, int]], asked: list[tuple[int, int]]) -> None:
    block = np.arange(1300, dtype=np.uint32).astype(np.uint8)
    base, memory = int(block.ctypes.data), RegisteredMemory()
    taken: list[tuple[int, int]] = []
    for start, nbytes in spans:
        free = all(start + nbytes <= low or start >= low + length for low, length in taken)
        try:
            memory.register(base + start, nbytes)
        except InvalidInput:
            assert not free
        else:
            assert free
            taken.append((start, nbytes))
    for start, nbytes in asked:
        inside = any(low <= start and start + nbytes <= low + length for low, length in taken)
        try:
            view = memory.view(base + start, nbytes)
        except InvalidInput:
            assert not inside
        else:
            assert inside
            assert view.tobytes() == block[start : start + nbytes].tobytes()


def test_many_views_are_those_of_each_alone() -> None:
    memory, one, other = RegisteredMemory(), np.arange(100, dtype=np.uint8), np.arange(100, 150, dtype=np.uint8)
    first, second = int(one.ctypes.data), int(other.ctypes.data)
    memory.register(first, one.nbytes)
    memory.register(second, other.nbytes)
    wanted = [(first, 10), (first + 90, 10), (second, 50), (first + 5, 0), (second + 49, 1), (first, 100)]
    views = memory.views([address for address, _ in wanted], [nbytes for _, nbytes in wanted])
    assert [bytes(view) for view in views] == [bytes(memory.view(*each)) for each in wanted]
    assert bytes(views[1]) == bytes(range(90, 100))
    for address, nbytes in ((first + 90, 11), (first - 1, 1), (first, -1), (second, 51), (second + 51, 0)):
        with pytest.raises(InvalidInput):
            memory.views([first, address], [10, nbytes])
    memory.unregister(second)
    with pytest.raises(InvalidInput):
        memory.views([first, second], [1, 1])
