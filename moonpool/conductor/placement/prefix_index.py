"""Knows which prefill workers, and which tiers of the pool, hold which blocks. Pure. A hint: it may be out of date.

Each chain key has one entry, an int with one bit per holder. A worker has a slot, and its bit is `1 << slot`; the pool
has a slot for SSD and one for the DRAM of each node. One walk down a prompt's keys gives the leading runs of all
workers: the workers left in the mask hold every block so far, and the workers that drop out at the same key have the
same run.

Bounds: a worker's blocks are bounded by its number of pages, the pool's by `max_pool_blocks`; further blocks are
counted and left out, so the index may promise too little but does not grow. An entry costs at most 170 + 4 * (slots //
30) bytes: its fingerprint (32), its place in a dict (110 at the worst load), its mask. Removing a holder costs nothing
at once: its bit no longer counts, later updates clear it shard by shard, and only then is the slot allocated again.

Only the leading run counts: eviction makes holes, so a later key says nothing about earlier ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from moonpool.base.keys import KEY_NBYTES, OBJECT_KEY_NBYTES
from moonpool.conductor.placement.paths import Places
from moonpool.conductor.placement.tables import Slots
from moonpool.store.messages import Tier


class Leading(NamedTuple):
    """The leading runs of one prompt. The first `pool` blocks are in the pool, those at the positions `on_ssd` on SSD
    only. `groups` are (run, mask of slots), ascending by run: each worker is in the group of its number of leading
    blocks. `places` says on which nodes the pool's blocks are; empty if it is not known of any block."""

    pool: int
    on_ssd: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]
    places: Places = ()

    def run_of(self, slot: int) -> int:
        return next(run for run, mask in self.groups if mask >> slot & 1)

    def num_on_ssd(self, start: int, end: int) -> int:
        """Return how many of the blocks start..end are on SSD only."""
        return bisect_left(self.on_ssd, end) - bisect_left(self.on_ssd, start) if self.on_ssd else 0


NodeRuns = Sequence[tuple[str, int]]
"""(node, number of objects) for each run of objects on one node; "" is not known."""

Prints = Sequence[int]
"""60-bit fingerprints of chain keys; the index keeps these instead of the keys."""

MAX_POOL_BLOCKS = 4_000_000
_NUM_SHARDS = 1024
_MAX_NODES = 1024
_FOUR = np.uint64(4)
_SHARD = _NUM_SHARDS - 1


def fingerprints(keys: Sequence[bytes]) -> list[int]:
    """Return the fingerprints of chain keys, each of KEY_NBYTES bytes."""
    if not keys:
        return []
    words = np.frombuffer(b"".join(keys), dtype="<u8")[:: KEY_NBYTES // 8]
    prints: list[int] = (words >> _FOUR).tolist()
    return prints


class PrefixIndex:
    def __init__(self, *, max_pool_blocks: int = MAX_POOL_BLOCKS) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._slots = Slots()
        self._workers: dict[str, _WorkerPart] = {}
        self._reported = 0  # mask of the workers whose reports are complete
        self._expected = _Expected()
        self._sweep_at = 0
        self._pool = _PoolPart(max_pool_blocks, self._slots)

    @property
    def pool_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def left_out(self) -> int:
        """Blocks that did not fit a bound, counted since their worker registered or the pool's snapshot came."""
        return self._pool.left_out + sum(part.left_out for part in self._workers.values())

    def worker_blocks(self, name: str) -> int:
        return self._workers[name].num_blocks

    def leading(self, prints: Prints, among: int) -> Leading:
        """Return the runs of the workers in the mask `among`, and of the pool."""
        shards, expected, reported = self._shards, self._expected.masks.get, self._reported
        dram, ssd = self._pool.dram, self._pool.ssd
        left, groups, on_ssd, runs = among, [], [], []
        in_pool, pool, last = True, 0, 0
        for depth, key in enumerate(prints):
            mask = shards[key & _SHARD].get(key, 0)
            if in_pool:
                here = mask & dram
                if here != last:
                    runs.append((pool, last))
                    last = here
                if here:
                    pool += 1
                elif mask & ssd:
                    on_ssd.append(pool)
                    pool += 1
                else:
                    in_pool = False
            if left:
                still = left & (mask & reported | expected(key, 0))
                if still != left:
                    groups.append((depth, left ^ still))
                    left = still
            elif not in_pool:
                break
        if left:
            groups.append((len(prints), left))
        if not self._pool.names:
            return Leading(pool, tuple(on_ssd), tuple(groups))
        runs.append((pool, last))
        name_of, begins = self._pool.names.get, [0, *[end for end, _ in runs]]
        places = [(end, name_of(bit, "")) for begin, (end, bit) in zip(begins, runs, strict=False) if begin < end]
        return Leading(pool, tuple(on_ssd), tuple(groups), tuple(places))

    # workers

    def add_worker(self, name: str, max_blocks: int) -> int:
        """Add a worker without blocks, in place of an earlier one of that name. Return its slot."""
        self.drop_worker(name)
        part = self._workers[name] = _WorkerPart(self._slots.allocate(), max_blocks)
        self._reported |= part.bit
        return part.slot

    def drop_worker(self, name: str) -> None:
        part = self._workers.pop(name, None)
        if part is not None:
            self._reported &= ~part.bit
            self._expected.forget(part.bit)
            self._slots.retire(part.slot)

    def report(self, name: str, sequence: int, cached: Sequence[bytes], dropped: Sequence[bytes]) -> bool:
        """Apply a worker's report. Return False if a report before it is missing: the worker then counts as empty until
        add_worker."""
        self._sweep()
        part = self._workers[name]
        if sequence != part.next_sequence:
            part.next_sequence, part.num_blocks = None, 0
            self._reported &= ~part.bit  # its bits go when the worker registers again
            return False
        part.next_sequence += 1
        self._hold(part, fingerprints(cached))
        for key in fingerprints(dropped):
            part.num_blocks -= self._clear(key, part.bit)
        return True

    def _hold(self, part: _WorkerPart, prints: Prints) -> None:
        shards, bit, room = self._shards, part.bit, part.max_blocks - part.num_blocks
        for key in prints:
            shard = shards[key & _SHARD]
            mask = shard.get(key, 0)
            if mask & bit:
                continue
            if room:
                shard[key] = mask | bit
                room -= 1
            else:
                part.left_out += 1
        part.num_blocks = part.max_blocks - room

    def expect(self, name: str, prints: Prints) -> None:
        """Count these blocks as held by the worker: a request with them was sent there, so the next request with the
        same prefix will find them."""
        self._expected.add(prints, self._workers[name].slot)

    def unexpect(self, name: str, prints: Prints) -> None:
        """Undo one `expect`. The worker has reported the blocks that it kept."""
        if name in self._workers:
            self._expected.remove(prints, self._workers[name].slot)

    # the pool

    def replace_pool(
        self, stored: Sequence[bytes], tiers: Iterable[tuple[bytes, Tier]] = (), nodes: NodeRuns = ()
    ) -> None:
        """Replace the pool's content by exactly these objects."""
        old = self._pool
        self._slots.retire(*old.slots)
        self._pool = _PoolPart(old.max_blocks, self._slots)
        self.update_pool(stored, (), tiers, nodes)

    def update_pool(
        self,
        stored: Sequence[bytes],
        removed: Iterable[bytes],
        tiers: Iterable[tuple[bytes, Tier]] = (),
        nodes: NodeRuns = (),
    ) -> None:
        """Apply changes of the pool. Stored objects count as in DRAM unless `tiers` names another tier. `nodes` says
        where the stored ones are, in their order; an object that is moved later counts as where it was stored."""
        at = 0
        for node, count in nodes or (("", len(stored)),):
            self.update_pool_prints(_block_prints(stored[at : at + count]), (), node)
            at += count
        self.update_pool_prints((), _block_prints(removed))
        for object_key, tier in tiers:
            self.set_tier(_block_prints((object_key,)), tier)

    def update_pool_prints(self, stored: Prints, removed: Prints, node: str = "") -> None:
        """As update_pool, by fingerprints, in the order of their objects; the stored ones are on that node."""
        self._sweep()
        pool, shards = self._pool, self._shards
        dram = pool.bit_of(node, self._slots)
        others = ~pool.mask
        for key in stored:
            shard = shards[key & _SHARD]
            mask = shard.get(key, 0)
            if mask & ~others or pool.store():
                shard[key] = mask & others | dram
        # A key in both counts as removed: a missed hit costs less than a pull that fails.
        for key in removed:
            pool.num_blocks -= self._clear(key, pool.mask)

    def set_tier(self, prints: Prints, tier: Tier) -> None:
        """Ignore blocks that are not known to be in the pool."""
        pool = self._pool
        ssd = pool.ssd if tier & Tier.SSD else 0
        in_dram = bool(tier & Tier.DRAM) or not ssd
        for key in prints:
            shard = self._shards[key & _SHARD]
            mask = shard.get(key, 0)
            if mask & pool.mask:
                dram = (mask & pool.dram or pool.unnamed) if in_dram else 0  # where it was
                shard[key] = mask & ~pool.mask | dram | ssd

    # entries

    def _clear(self, key: int, bits: int) -> bool:
        """Clear the bits of a key. Return whether any of them was set."""
        shard = self._shards[key & _SHARD]
        mask = shard.get(key, 0)
        if not mask & bits:
            return False
        if mask & ~bits:
            shard[key] = mask & ~bits
        else:
            del shard[key]
        return True

    def _sweep(self) -> None:
        """Clear the retired bits in one shard. After the last shard the retired slots are free."""
        retired = self._slots.sweeping
        if not retired:
            return
        shard = self._shards[self._sweep_at]
        for key in [key for key, mask in shard.items() if mask & retired]:
            self._clear(key, retired)
        self._sweep_at = (self._sweep_at + 1) & _SHARD
        if self._sweep_at == 0:
            self._slots.finish_sweep()


class _WorkerPart:
    __slots__ = ("bit", "left_out", "max_blocks", "next_sequence", "num_blocks", "slot")

    def __init__(self, slot: int, max_blocks: int) -> None:
        self.slot, self.bit = slot, 1 << slot
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self.left_out = 0
        self.next_sequence: int | None = 1


class _PoolPart:
    def __init__(self, max_blocks: int, slots: Slots) -> None:
        self.max_blocks = max_blocks
        self.slots = [slots.allocate(), slots.allocate()]
        self.unnamed, self.ssd = (1 << slot for slot in self.slots)
        self.dram = self.unnamed  # the bits of all nodes: one of them is set for a block in memory
        self.mask = self.dram | self.ssd
        self.names: dict[int, str] = {}  # by bit
        self._bits: dict[str, int] = {}
        self.num_blocks = 0
        self.left_out = 0

    def bit_of(self, node: str, slots: Slots) -> int:
        """Return the bit of blocks in that node's memory; nodes beyond a bound have no bit of their own."""
        bit = self._bits.get(node) if node else self.unnamed
        if bit is not None or len(self.names) >= _MAX_NODES:
            return bit or self.unnamed
        self.slots.append(slots.allocate())
        bit = self._bits[node] = 1 << self.slots[-1]
        self.names[bit] = node
        self.dram |= bit
        self.mask |= bit
        return bit

    def store(self) -> bool:
        """Count a new block. Return False if the bound leaves no room for it."""
        if self.num_blocks >= self.max_blocks:
            self.left_out += 1
            return False
        self.num_blocks += 1
        return True


class _Expected:
    """Blocks of requests that were sent to a worker. `masks` has the workers of each block; `_again` counts the further
    requests with the same block and worker."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self._again: dict[tuple[int, int], int] = {}

    def add(self, prints: Prints, slot: int) -> None:
        masks, bit = self.masks, 1 << slot
        for key in prints:
            mask = masks.get(key, 0)
            if mask & bit:
                self._again[key, slot] = self._again.get((key, slot), 0) + 1
            else:
                masks[key] = mask | bit

    def remove(self, prints: Prints, slot: int) -> None:
        masks, again, bit = self.masks, self._again, 1 << slot
        for key in prints:
            more = again.get((key, slot), 0) if again else 0
            if more > 1:
                again[key, slot] = more - 1
            elif more:
                del again[key, slot]
            elif masks.get(key, 0) & bit:
                mask = masks[key] = masks[key] & ~bit
                if not mask:
                    del masks[key]

    def forget(self, bit: int) -> None:
        """Remove all blocks of one worker."""
        self.masks = {key: left for key, mask in self.masks.items() if (left := mask & ~bit)}
        self._again = {(key, slot): count for (key, slot), count in self._again.items() if 1 << slot != bit}


def _block_prints(object_keys: Iterable[bytes]) -> list[int]:
    """Return the fingerprints of the blocks among the store's keys; objects of other kinds are ignored."""
    return fingerprints([key[:KEY_NBYTES] for key in object_keys if len(key) == OBJECT_KEY_NBYTES])
