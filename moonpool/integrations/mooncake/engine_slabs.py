"""Managed buffers of `mooncake.engine`: power-of-two slabs, cut from arenas of memory that the caller adds. Pure.

A slab is cut in halves until it fits, and two free halves become one slab again. Buffers larger than the largest slab
have an arena of their own, which free() gives back.
"""

from __future__ import annotations

from collections.abc import Callable

MIN_SLAB_NBYTES = 8 * 1024
MAX_SLAB_NBYTES = 256 * 1024 * 1024
ARENA_NBYTES = 16 * 1024 * 1024  # of small slabs; a larger slab has an arena of its own size


class SlabAllocator:
    """Not thread-safe. `add_arena(nbytes)` returns the address of new memory or raises; `drop_arena(address)` gives it
    back.
    """

    def __init__(self, add_arena: Callable[[int], int], drop_arena: Callable[[int], None]) -> None:
        self._add_arena = add_arena
        self._drop_arena = drop_arena
        self._free: dict[int, set[int]] = {}  # by size of the slab
        self._arena_of: dict[int, int] = {}  # the arena of each slab, by the slab's address, free or not
        self._arena_nbytes: dict[int, int] = {}
        self._used: dict[int, int] = {}  # size by address

    def allocate(self, nbytes: int) -> int:
        """Return the address of a buffer of at least `nbytes`. Raise what `add_arena` raises."""
        size = slab_nbytes(nbytes)
        if size > MAX_SLAB_NBYTES:
            address = self._add_arena(nbytes)
            self._used[address] = nbytes
            return address
        address = self._take(size)
        self._used[address] = size
        return address

    def free(self, address: int) -> bool:
        """Free the buffer at `address`. Return False when no buffer in use begins there."""
        size = self._used.pop(address, None)
        if size is None:
            return False
        if size > MAX_SLAB_NBYTES:
            self._drop_arena(address)
        else:
            self._give(address, size)
        return True

    def _take(self, size: int) -> int:
        """Return a slab of exactly this size: a free one, a half of a larger one, or one of a new arena."""
        if self._free.get(size):
            return self._free[size].pop()
        if size >= ARENA_NBYTES:
            arena = self._add_arena(size)
            self._arena_of[arena], self._arena_nbytes[arena] = arena, size
            return arena
        whole = self._take(size * 2)
        half = whole + size
        self._arena_of[half] = self._arena_of[whole]
        self._free.setdefault(size, set()).add(half)
        return whole

    def _give(self, address: int, size: int) -> None:
        """Put a slab back. Join it with its other half as long as that is free."""
        arena = self._arena_of[address]
        while size < self._arena_nbytes[arena]:
            other = arena + ((address - arena) ^ size)
            if other not in self._free.get(size, ()):
                break
            self._free[size].remove(other)
            del self._arena_of[max(address, other)]
            address, size = min(address, other), size * 2
        self._free.setdefault(size, set()).add(address)


def slab_nbytes(nbytes: int) -> int:
    """Return the size of the slab for a buffer of `nbytes`: the next power of two, at least MIN_SLAB_NBYTES."""
    return max(MIN_SLAB_NBYTES, 1 << max(0, nbytes - 1).bit_length())
