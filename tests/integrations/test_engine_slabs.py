"""Managed buffers: no two overlap, freed halves become whole again, large ones go back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.integrations.mooncake.engine_slabs import (
    ARENA_NBYTES,
    MAX_SLAB_NBYTES,
    MIN_SLAB_NBYTES,
    SlabAllocator,
    slab_nbytes,
)


class Arenas:
    """Addresses without memory."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._next = 4096

    def add(self, nbytes: int) -> int:
        address, self._next = self._next, self._next + nbytes + 4096
        self.sizes[address] = nbytes
        return address

    def drop(self, address: int) -> None:
        del self.sizes[address]


def test_sizes_of_slabs() -> None:
    assert [slab_nbytes(each) for each in (0, 1, 8192, 8193)] == [8192, 8192, 8192, 16384]


@given(st.lists(st.one_of(st.integers(1, 2 * ARENA_NBYTES), st.just(MAX_SLAB_NBYTES + 1), st.none()), max_size=60))
def test_buffers_never_overlap_and_all_memory_comes_back(steps: list[int | None]) -> None:
    arenas = Arenas()
    slabs, used = SlabAllocator(arenas.add, arenas.drop), dict[int, int]()
    for nbytes in steps:
        if nbytes is not None:
            address = slabs.allocate(nbytes)
            inside = [a for a, size in arenas.sizes.items() if a <= address and address + nbytes <= a + size]
            assert len(inside) == 1
            assert all(address + nbytes <= a or a + size <= address for a, size in used.items())
            used[address] = nbytes
        elif used:
            assert slabs.free(used.popitem()[0])
    for address in used:
        assert slabs.free(address)
        assert not slabs.free(address)
    before = dict(arenas.sizes)
    assert all(size <= MAX_SLAB_NBYTES for size in before.values())  # larger ones went back
    for size in before.values():
        slabs.allocate(size)
    assert arenas.sizes == before  # every arena was whole again


def test_an_arena_is_shared_by_small_buffers() -> None:
    arenas = Arenas()
    slabs = SlabAllocator(arenas.add, arenas.drop)
    addresses = {slabs.allocate(1) for _ in range(ARENA_NBYTES // MIN_SLAB_NBYTES)}
    assert len(addresses) == ARENA_NBYTES // MIN_SLAB_NBYTES
    assert list(arenas.sizes.values()) == [ARENA_NBYTES]
    assert not slabs.free(min(addresses) + 1)
