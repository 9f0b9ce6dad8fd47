"""The master's whole state: objects, puts, leases, pins, segments, eviction. Pure: no clock, no I/O, no randomness.

Every method is an event with its moment, `now_s`, which never runs backwards; the same events give the same state.
Batches are positional: one bad item never fails its neighbours. What it promises:

- An object is visible from put_end to its end, and its bytes are not reused while it is leased or pinned.
- A key has at most one object and at most one unfinished put; the latter frees the key after put_discard_s.
- Space is granted with a generation that is higher than any before it, across restarts too (epoch << 32).
- No event does work in proportion to the number of objects: eviction and the sweep after a lost node go in steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moonpool.base.errors import AlreadyExists, InvalidInput, MoonpoolError, NoSpace, StaleGeneration
from moonpool.store.eviction import EvictionPolicy, LeastRecentlyUsed
from moonpool.store.fates import Fate
from moonpool.store.index import Budget, ObjectIndex
from moonpool.store.integrity import check_pool
from moonpool.store.messages import (
    MountReply,
    ObjectInfo,
    Placement,
    PutGrant,
    PutItem,
    PutOutcome,
    Refusal,
    StoreStats,
    Written,
)
from moonpool.store.objects import PendingPut, StoredObject
from moonpool.store.rules import PoolRules
from moonpool.store.segments import SegmentTable
from moonpool.store.space import SpaceReturns
from moonpool.transfer.descriptor import SegmentDescriptor

EPOCH_BITS = 32
MAX_KEY_NBYTES = 1024
MAX_REPLICAS = 16
# Candidates one put_start batch may look at when it has to evict before it can place.
_URGENT_CANDIDATES = 4096


class PoolState:
    """See the module. `epoch` must be higher than in every earlier life of this master."""

    def __init__(self, rules: PoolRules, epoch: int, policy: EvictionPolicy[StoredObject] | None = None) -> None:
        self.rules = rules
        self.epoch = epoch
        self._generation = epoch << EPOCH_BITS
        self._segments = SegmentTable()
        self._is_alive = self._segments.is_alive
        self._space = SpaceReturns(self._segments)
        order: EvictionPolicy[StoredObject] = LeastRecentlyUsed() if policy is None else policy
        self._index = ObjectIndex(rules, self._segments, self._space, order)
        self._puts: dict[bytes, PendingPut] = {}  # oldest first
        self._evicting = False
        self._counters = dict.fromkeys(("hits", "misses", "refused", "discarded"), 0)

    # putting

    def put_start(self, items: Sequence[PutItem], now_s: float) -> list[PutOutcome]:
        """Space for each item, on up to num_replicas distinct segments and at least one; or why not."""
        budget = Budget(_URGENT_CANDIDATES)
        return [self._put_start(item, now_s, budget) for item in items]

    def put_end(self, items: Sequence[Written], now_s: float) -> list[Refusal | None]:
        """Makes the objects visible. Said twice it is no error; said too late it is StaleGeneration."""
        return [self._put_end(item, now_s) for item in items]

    def put_revoke(self, items: Sequence[Written], settled: bool, now_s: float) -> None:
        """Ends unfinished puts. The space rests unless no write can still be under way (`settled`)."""
        for item in items:
            put = self._puts.get(item.key)
            if put is not None and put.generation == item.generation:
                free_at_s = now_s if settled else put.started_s + self.rules.put_release_s
                self._abandon(put, Fate.PUT_REVOKED, free_at_s, now_s)

    # reading

    def lookup(self, keys: Sequence[bytes], prefix: bool, now_s: float) -> list[ObjectInfo | None]:
        """Where the objects are, each leased; with `prefix` everything behind the first missing key is None."""
        found: list[ObjectInfo | None] = []
        access, lease_s = self._index.access, self.rules.lease_s
        for key in keys:
            entry = access(key, now_s)
            if entry is not None:
                found.append(ObjectInfo(key, entry.generation, entry.nbytes, entry.placements, lease_s))
            elif prefix:
                break
            else:
                found.append(None)
        num_found = len(found) - found.count(None)
        self._counters["hits"] += num_found
        self._counters["misses"] += len(keys) - num_found
        return found + [None] * (len(keys) - len(found))

    def exist(self, keys: Sequence[bytes], now_s: float) -> list[bool]:
        """As lookup, leases included, without the places."""
        access = self._index.access
        return [access(key, now_s) is not None for key in keys]

    def report_corrupt(self, key: bytes, generation: int, segment: str, now_s: float) -> bool:
        """Quarantines one replica. False when that object is gone or replaced: the reader was only late."""
        return self._index.quarantine(key, generation, segment, now_s)

    def remove(self, keys: Sequence[bytes], force: bool, now_s: float) -> list[bool]:
        """True where no object is under the key now. Leased and pinned ones stay unless `force`."""
        return [self._index.remove(key, force, now_s) for key in keys]

    # pins

    def pin(self, connection: int, keys: Sequence[bytes], now_s: float) -> list[bool]:
        """Keeps the objects until unpin or connection_closed; pins count. True where there is an object."""
        return [self._index.pin(connection, key, now_s) for key in keys]

    def unpin(self, connection: int, keys: Sequence[bytes], now_s: float) -> None:
        for key in keys:
            self._index.unpin(connection, key, now_s)

    def connection_closed(self, connection: int, now_s: float) -> None:
        """The pins of that connection end."""
        self._index.unpin_all(connection, now_s)

    # segments

    def mount(self, node: str, descriptor: SegmentDescriptor, now_s: float) -> MountReply:
        """Takes a segment in, empty; used from its first heartbeat on. Saying it twice changes nothing."""
        known = self._segments.get(descriptor.name)
        if known is None or known.descriptor.incarnation != descriptor.incarnation:
            known = self._segments.mount(node, descriptor, self._generation, now_s)
            self._index.start_sweep()  # of what an earlier incarnation held
        return MountReply(epoch=self.epoch, heartbeat_s=self.rules.heartbeat_s, generation_floor=known.floor)

    def unmount(self, segment: str, incarnation: int) -> None:
        if self._segments.unmount(segment, incarnation):
            self._index.start_sweep()

    def heartbeat(self, segment: str, incarnation: int, now_s: float) -> bool:
        """False: mount it again, as a new incarnation."""
        return self._segments.heartbeat(segment, incarnation, now_s)

    def segments(self) -> list[SegmentDescriptor]:
        return [each.descriptor for each in self._segments.all()]

    # time

    def tick(self, now_s: float) -> bool:
        """One bounded step of everything that time brings. True: call again soon, there is more to do."""
        limit = self.rules.step_objects
        if self._segments.expire(now_s - self.rules.segment_ttl_s):
            self._index.start_sweep()
        self._discard_late_puts(now_s)
        resting = self._space.release_due(now_s, limit) == limit
        sweeping = self._index.sweep(now_s, limit)
        evicting = self._evict_by_watermark(now_s, Budget(limit))
        return resting or sweeping or evicting

    # questions

    def why(self, key: bytes, now_s: float) -> str:
        """What became of a key, in a sentence."""
        entry = self._index.get(key, now_s)
        if entry is not None:
            places = ", ".join(each.segment for each in entry.placements)
            return f"this object is stored: {entry.nbytes} bytes on {places}"
        if key in self._puts:
            return f"this object is being written since {now_s - self._puts[key].started_s:.1f} s"
        return self._index.fates.tell(key, now_s)

    def stats(self) -> StoreStats:
        return StoreStats(
            num_objects=len(self._index),
            capacity_nbytes=self._segments.capacity_nbytes,
            used_nbytes=self._segments.used_nbytes,
            segments=tuple(each.stats() for each in self._segments.all()),
            counters={**self._counters, **self._index.counters, "puts_in_progress": len(self._puts)},
        )

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]] | None:
        """Keys (stored, removed) since the last call, each in one of the two; None when nothing changed."""
        return self._index.take_changes()

    def snapshot(self) -> Iterator[tuple[bytes, ...]]:
        """All keys in parts. With the changes taken after the first part was asked for, the picture is whole."""
        return self._index.snapshot()

    def check_integrity(self) -> None:
        """Raises AssertionError when index, allocators, eviction order, pins and byte counts disagree."""
        check_pool(self._segments, self._index, self._puts, self._space)

    # one put

    def _put_start(self, item: PutItem, now_s: float, budget: Budget) -> PutOutcome:
        try:
            self._check_put(item, now_s)
            placements = self._place(item, now_s, budget)
        except MoonpoolError as error:
            self._counters["refused"] += 1
            return PutOutcome(refusal=Refusal(error.code, str(error)))
        self._generation += 1
        put = PendingPut(item.key, item.nbytes, self._generation, placements, item.pinned, now_s)
        self._puts[item.key] = put
        return PutOutcome(grant=PutGrant(item.key, put.generation, placements))

    def _check_put(self, item: PutItem, now_s: float) -> None:
        if not 0 < len(item.key) <= MAX_KEY_NBYTES:
            raise InvalidInput(f"a key has 1 to {MAX_KEY_NBYTES} bytes, not {len(item.key)}")
        if item.nbytes <= 0 or not 0 < item.num_replicas <= MAX_REPLICAS:
            raise InvalidInput(f"a put has at least one byte and 1 to {MAX_REPLICAS} replicas")
        if self._index.get(item.key, now_s) is not None:
            raise AlreadyExists("the key is stored already")
        put = self._puts.get(item.key)
        if put is not None and not self._discard_if_late(put, now_s):
            raise AlreadyExists("another put of this key is under way")

    def _place(self, item: PutItem, now_s: float, budget: Budget) -> tuple[Placement, ...]:
        placements = self._segments.place(item.nbytes, item.num_replicas, item.preferred_segment)
        if placements:
            return placements
        if not self._segments.could_hold(item.nbytes):
            raise NoSpace(f"no mounted segment could hold {item.nbytes} bytes")
        while self._index.evict_one(Fate.EVICTED_FOR_PUT, now_s, budget):
            placements = self._segments.place(item.nbytes, item.num_replicas, item.preferred_segment)
            if placements:
                return placements
        raise NoSpace(f"no space for {item.nbytes} bytes: what is stored is leased, pinned or being written")

    def _put_end(self, item: Written, now_s: float) -> Refusal | None:
        put = self._puts.get(item.key)
        if put is None or put.generation != item.generation or self._discard_if_late(put, now_s):
            stored = self._index.get(item.key, now_s)
            if stored is not None and stored.generation == item.generation:
                return None
            return _stale("the put was discarded: it took too long, or its space was taken back")
        lost = [each for each in put.placements if each.segment in item.failed_segments or not self._is_alive(each)]
        if len(lost) == len(put.placements):
            self._abandon(put, Fate.PUT_ABANDONED, put.started_s + self.rules.put_release_s, now_s)
            return _stale("no replica of the put is left: its nodes are gone or could not be written to")
        del self._puts[item.key]
        if lost:
            self._space.rest(lost, put.nbytes, put.started_s + self.rules.put_release_s, now_s)
            put.placements = tuple(each for each in put.placements if each not in lost)
        self._index.insert(put)
        return None

    def _abandon(self, put: PendingPut, fate: Fate, free_at_s: float, now_s: float) -> None:
        del self._puts[put.key]
        self._counters["discarded"] += 1
        self._space.rest(put.placements, put.nbytes, free_at_s, now_s)
        self._index.fates.record(put.key, fate, now_s)

    def _discard_if_late(self, put: PendingPut, now_s: float) -> bool:
        if now_s < put.started_s + self.rules.put_discard_s:
            return False
        self._abandon(put, Fate.PUT_ABANDONED, put.started_s + self.rules.put_release_s, now_s)
        return True

    def _discard_late_puts(self, now_s: float) -> None:
        late = []
        for put in self._puts.values():
            if now_s < put.started_s + self.rules.put_discard_s:
                break
            late.append(put)
        for put in late:
            self._discard_if_late(put, now_s)

    # eviction

    def _evict_by_watermark(self, now_s: float, budget: Budget) -> bool:
        """Evicts until the low mark is reached or the budget is spent. True when it should go on soon."""
        used, capacity = self._segments.used_nbytes, self._segments.capacity_nbytes
        if used > self.rules.high_watermark * capacity:
            self._evicting = True
        progress = False
        while self._evicting:
            if self._segments.used_nbytes <= self.rules.low_watermark * capacity:
                self._evicting = False
            elif not self._index.evict_one(Fate.EVICTED_WATERMARK, now_s, budget):
                return progress
            else:
                progress = True
        return False


def _stale(message: str) -> Refusal:
    return Refusal(StaleGeneration.code, message)
