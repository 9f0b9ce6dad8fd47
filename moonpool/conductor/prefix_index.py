"""Who holds which prefix: one part per prefill worker and one for the pool. Pure; a hint, never the truth.

A part is a set of 60-bit fingerprints of chain keys: BYTES_PER_KEY bounds what one key costs in one part. A
worker's part is bounded by its number of pages and the pool's by `max_pool_blocks`; what does not fit is
counted and left out, so the index may promise too little and grows no further.

Only the leading run counts: evictions punch holes, so a later key says nothing about the earlier ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moonpool.base.keys import OBJECT_KEY_NBYTES, chain_key_of

# An int of at most 60 bits takes 32 bytes. Its set entry takes 16 bytes at a load that is at least 0.15, and 0.3 in
# sets of over 50,000 keys, where it comes to 90 bytes at most (checked by a test).
BYTES_PER_KEY = 144


class Leading(NamedTuple):
    """Number of leading blocks in the pool and in each worker's pages."""

    pool: int
    workers: dict[str, int]


class PrefixIndex:
    """`shards_per_block` is how many objects (layer groups x head shards) make one whole block in the pool."""

    def __init__(self, *, max_pool_blocks: int = 4_000_000, shards_per_block: int = 1) -> None:
        self._workers: dict[str, _WorkerPart] = {}
        self._pool = _PoolPart(max_pool_blocks, shards_per_block)

    @property
    def pool_blocks(self) -> int:
        return len(self._pool.whole)

    @property
    def left_out(self) -> int:
        """Keys that did not fit a bound since the start of their part."""
        return self._pool.left_out + sum(part.left_out for part in self._workers.values())

    def worker_blocks(self, name: str) -> int:
        return len(self._workers[name].held)

    def leading_blocks(self, keys: Sequence[bytes]) -> Leading:
        prints = [_fingerprint(key) for key in keys]
        pool = _run(prints, self._pool.whole, ())
        return Leading(pool, {name: _run(prints, part.held, part.expected) for name, part in self._workers.items()})

    # workers

    def add_worker(self, name: str, max_blocks: int) -> None:
        """Starts an empty part, in place of an earlier one of that name."""
        self._workers[name] = _WorkerPart(max_blocks)

    def drop_worker(self, name: str) -> None:
        self._workers.pop(name, None)

    def report(self, name: str, sequence: int, cached: Iterable[bytes], dropped: Iterable[bytes]) -> bool:
        """False when a report is missing: the part is then unknown, counts as empty and stays so until add_worker."""
        return self._workers[name].report(sequence, cached, dropped)

    def expect(self, name: str, keys: Iterable[bytes]) -> None:
        """A request with these blocks was sent there: the next one with the same prefix will find them."""
        self._workers[name].expected.update(map(_fingerprint, keys))

    def unexpect(self, name: str, keys: Iterable[bytes]) -> None:
        """Takes an `expect` back; what the worker really kept, it has reported meanwhile."""
        if name in self._workers:
            self._workers[name].unexpect(keys)

    # the pool

    def replace_pool(self, stored: Iterable[bytes]) -> None:
        """The pool holds exactly these objects."""
        self._pool = _PoolPart(self._pool.max_blocks, self._pool.shards_per_block)
        self._pool.store(stored)

    def update_pool(self, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        # A key in both is taken as removed: a missed hit costs less than a promise that fails.
        self._pool.store(stored)
        self._pool.remove(removed)


class _WorkerPart:
    def __init__(self, max_blocks: int) -> None:
        self.held: set[int] = set()
        self.expected: Counter[int] = Counter()
        self.left_out = 0
        self._max_blocks = max_blocks
        self._next_sequence: int | None = 1

    def report(self, sequence: int, cached: Iterable[bytes], dropped: Iterable[bytes]) -> bool:
        if sequence != self._next_sequence:
            self._next_sequence = None
            self.held = set()
            return False
        self._next_sequence += 1
        for key in map(_fingerprint, cached):
            if len(self.held) < self._max_blocks:
                self.held.add(key)
            else:
                self.left_out += key not in self.held
        self.held.difference_update(map(_fingerprint, dropped))
        return True

    def unexpect(self, keys: Iterable[bytes]) -> None:
        for key in map(_fingerprint, keys):
            count = self.expected.get(key, 0)
            if count > 1:
                self.expected[key] = count - 1
            elif count:
                del self.expected[key]


class _PoolPart:
    """`whole` has the blocks all of whose shards are stored; `partial` counts the shards of the others."""

    def __init__(self, max_blocks: int, shards_per_block: int) -> None:
        self.max_blocks = max_blocks
        self.shards_per_block = shards_per_block
        self.whole: set[int] = set()
        self.partial: dict[int, int] = {}
        self.left_out = 0

    def store(self, keys: Iterable[bytes]) -> None:
        for key in _block_prints(keys):
            count = self.partial.pop(key, 0) + 1
            if len(self.whole) + len(self.partial) >= self.max_blocks and key not in self.whole:
                self.left_out += 1
            elif count >= self.shards_per_block:
                self.whole.add(key)
            else:
                self.partial[key] = count

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in _block_prints(keys):
            count = self.shards_per_block if key in self.whole else self.partial.pop(key, 0)
            self.whole.discard(key)
            if count > 1:
                self.partial[key] = count - 1


def _fingerprint(key: bytes) -> int:
    return int.from_bytes(key[:8], "little") >> 4


def _block_prints(object_keys: Iterable[bytes]) -> Iterable[int]:
    """Fingerprints of the blocks among the store's keys; other kinds of objects are none of ours."""
    return (_fingerprint(chain_key_of(key)) for key in object_keys if len(key) == OBJECT_KEY_NBYTES)


def _run(prints: Sequence[int], held: set[int], expected: Counter[int] | tuple[int, ...]) -> int:
    count = 0
    for key in prints:
        if key not in held and key not in expected:
            break
        count += 1
    return count
