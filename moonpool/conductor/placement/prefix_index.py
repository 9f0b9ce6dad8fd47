"""Who holds which prefix: prefill workers, and the pool by tier. Pure; a hint, never the truth.

One entry per chain key, whoever holds it: an int with one bit per holder. A worker has a slot, and its bit is
`1 << slot`; the pool has two, for DRAM and for SSD. So the leading runs of all workers are one walk down the keys:
the workers left in the mask hold everything so far, and those that drop out together have the same run.

Bounds: a worker's blocks by its number of pages, the pool's by `max_pool_blocks`; what does not fit is counted and
left out, so the index may promise too little and grows no further. An entry costs at most 170 + 4 * (slots // 30)
bytes: its fingerprint (32), its place in a dict (110 at the worst load), its mask.
A holder that goes costs nothing at once: its bit counts no more, later updates clear it shard by shard, and only
then is the slot given to another.

Only the leading run counts: evictions punch holes, so a later key says nothing about the earlier ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from moonpool.base.keys import KEY_NBYTES, OBJECT_KEY_NBYTES
from moonpool.conductor.placement.leading import Leading
from moonpool.conductor.placement.slots import Slots
from moonpool.store.messages import Tier

Prints = Sequence[int]
"""60-bit fingerprints of chain keys: what the index knows them by."""

MAX_POOL_BLOCKS = 4_000_000
_NUM_SHARDS = 1024
_FOUR = np.uint64(4)
_SHARD = _NUM_SHARDS - 1


def fingerprints(keys: Sequence[bytes]) -> list[int]:
    """Of chain keys, all of KEY_NBYTES."""
    if not keys:
        return []
    words = np.frombuffer(b"".join(keys), dtype="<u8")[:: KEY_NBYTES // 8]
    prints: list[int] = (words >> _FOUR).tolist()
    return prints


class PrefixIndex:
    def __init__(self, *, max_pool_blocks: int = MAX_POOL_BLOCKS) -> None:
        self._holders: list[dict[int, int]] = [{} for _ in range(_NUM_SHARDS)]
        self._slots = Slots()
        self._workers: dict[str, _WorkerPart] = {}
        self._reported = 0  # mask of the workers whose reports are complete
        self._expected = _Expected()
        self._sweep_at = 0
        self._pool = _PoolPart(max_pool_blocks, self._slots)

    @property
    def num_slots(self) -> int:
        """One more than the highest slot ever given."""
        return self._slots.num_slots

    @property
    def num_keys(self) -> int:
        return sum(map(len, self._holders))

    @property
    def pool_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def left_out(self) -> int:
        """Keys that did not fit a bound since the start of their part."""
        return self._pool.left_out + sum(part.left_out for part in self._workers.values())

    def worker_blocks(self, name: str) -> int:
        return self._workers[name].num_blocks

    def leading(self, prints: Prints, among: int) -> Leading:
        """Runs of the workers in the mask `among`, and of the pool."""
        holders, expected, reported = self._holders, self._expected.masks.get, self._reported
        dram, ssd = self._pool.dram, self._pool.ssd
        left, groups, on_ssd = among, [], []
        in_pool, pool = True, 0
        for depth, key in enumerate(prints):
            mask = holders[key & _SHARD].get(key, 0)
            if in_pool:
                if mask & dram:
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
        return Leading(pool, tuple(on_ssd), tuple(groups))

    # workers

    def add_worker(self, name: str, max_blocks: int) -> int:
        """Starts an empty part, in place of an earlier one of that name; its slot."""
        self.drop_worker(name)
        part = self._workers[name] = _WorkerPart(self._slots.take(), max_blocks)
        self._reported |= part.bit
        return part.slot

    def drop_worker(self, name: str) -> None:
        part = self._workers.pop(name, None)
        if part is not None:
            self._reported &= ~part.bit
            self._expected.forget(part.bit)
            self._slots.retire(part.slot)

    def report(self, name: str, sequence: int, cached: Sequence[bytes], dropped: Sequence[bytes]) -> bool:
        """False when a report is missing: the part is then unknown, counts as empty and stays so until add_worker."""
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
        holders, bit, room = self._holders, part.bit, part.max_blocks - part.num_blocks
        for key in prints:
            shard = holders[key & _SHARD]
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
        """A request with these blocks was sent there: the next one with the same prefix will find them."""
        self._expected.add(prints, self._workers[name].slot)

    def unexpect(self, name: str, prints: Prints) -> None:
        """Takes an `expect` back; what the worker really kept, it has reported meanwhile."""
        if name in self._workers:
            self._expected.remove(prints, self._workers[name].slot)

    # the pool

    def replace_pool(self, stored: Iterable[bytes], tiers: Iterable[tuple[bytes, Tier]] = ()) -> None:
        """The pool holds exactly these objects."""
        old = self._pool
        self._slots.retire(*old.slots)
        self._pool = _PoolPart(old.max_blocks, self._slots)
        self.update_pool(stored, (), tiers)

    def update_pool(
        self, stored: Iterable[bytes], removed: Iterable[bytes], tiers: Iterable[tuple[bytes, Tier]] = ()
    ) -> None:
        """Stored objects are in DRAM unless `tiers` says otherwise."""
        self.update_pool_prints(_block_prints(stored), _block_prints(removed))
        for object_key, tier in tiers:
            self.set_tier(_block_prints((object_key,)), tier)

    def update_pool_prints(self, stored: Prints, removed: Prints) -> None:
        """The same for whoever has fingerprints, in the order of their objects."""
        self._sweep()
        pool, holders = self._pool, self._holders
        dram, others = pool.dram, ~pool.mask
        for key in stored:
            shard = holders[key & _SHARD]
            mask = shard.get(key, 0)
            if mask & ~others or pool.store():
                shard[key] = mask & others | dram
        # A key in both is taken as removed: a missed hit costs less than a promise that fails.
        for key in removed:
            pool.num_blocks -= self._clear(key, pool.mask)

    def set_tier(self, prints: Prints, tier: Tier) -> None:
        """Ignore blocks that are not known to be in the pool."""
        pool = self._pool
        bits = (pool.dram if tier & Tier.DRAM else 0) | (pool.ssd if tier & Tier.SSD else 0)
        for key in prints:
            shard = self._holders[key & _SHARD]
            mask = shard.get(key, 0)
            if mask & pool.mask:
                shard[key] = mask & ~pool.mask | (bits or pool.dram)

    # entries

    def _clear(self, key: int, bits: int) -> bool:
        """Whether any of the bits was set."""
        shard = self._holders[key & _SHARD]
        mask = shard.get(key, 0)
        if not mask & bits:
            return False
        if mask & ~bits:
            shard[key] = mask & ~bits
        else:
            del shard[key]
        return True

    def _sweep(self) -> None:
        """Clears the retired bits of one shard; slots whose bits are gone from all shards can be taken again."""
        gone = self._slots.sweeping
        if not gone:
            return
        shard = self._holders[self._sweep_at]
        for key in [key for key, mask in shard.items() if mask & gone]:
            self._clear(key, gone)
        self._sweep_at = (self._sweep_at + 1) & _SHARD
        if self._sweep_at == 0:
            self._slots.swept()


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
        self.slots = slots.take(), slots.take()
        self.dram, self.ssd = (1 << slot for slot in self.slots)
        self.mask = self.dram | self.ssd
        self.num_blocks = 0
        self.left_out = 0

    def store(self) -> bool:
        """Count a new block. Return False if the bound leaves no room for it."""
        if self.num_blocks >= self.max_blocks:
            self.left_out += 1
            return False
        self.num_blocks += 1
        return True


class _Expected:
    """Blocks of requests on their way to a worker. `masks` has the workers; `_again` counts where there are several."""

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
        """All of one worker's."""
        self.masks = {key: left for key, mask in self.masks.items() if (left := mask & ~bit)}
        self._again = {(key, slot): count for (key, slot), count in self._again.items() if 1 << slot != bit}


def _block_prints(object_keys: Iterable[bytes]) -> list[int]:
    """Fingerprints of the blocks among the store's keys; other kinds of objects are none of ours."""
    return fingerprints([key[:KEY_NBYTES] for key in object_keys if len(key) == OBJECT_KEY_NBYTES])
