"""The readable objects: found by key, ordered for eviction, leased, pinned, quarantined, dropped. Pure.

Objects that lost a replica with its segment are pruned when somebody asks for them and, in steps, by sweep(); so a
lost node costs nothing at the moment it is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moonpool.store.eviction import EvictionPolicy
from moonpool.store.fates import Fate, Fates
from moonpool.store.objects import NUM_SHARDS, PendingPut, ShardedDict, StoredObject
from moonpool.store.pins import PinTable
from moonpool.store.rules import PoolRules
from moonpool.store.segments import SegmentTable
from moonpool.store.space import SpaceReturns


@dataclass
class Budget:
    """How many objects may still be looked at in one step."""

    num_objects: int


class ObjectIndex:
    def __init__(
        self, rules: PoolRules, segments: SegmentTable, space: SpaceReturns, policy: EvictionPolicy[StoredObject]
    ) -> None:
        self.fates = Fates(rules.max_fates)
        self.counters = dict.fromkeys(("stored", "removed", "evicted", "corrupt_replicas", "lost"), 0)
        self.policy = policy
        self.pins = PinTable()
        self._lease_s = rules.lease_s
        self._segments = segments
        self._space = space
        self._objects: ShardedDict[StoredObject] = ShardedDict()
        self._num_objects = 0
        self._changes: dict[bytes, bool] = {}  # key -> stored (True) or removed, since they were taken last
        self._shards_to_sweep = 0

    def __len__(self) -> int:
        return self._num_objects

    def entries(self) -> Iterator[StoredObject]:
        return self._objects.values()

    def get(self, key: bytes, now_s: float) -> StoredObject | None:
        """The object, without replicas that went with their segment; None when that leaves nothing."""
        entry = self._objects.get(key)
        if entry is not None and self._shards_to_sweep:
            self._prune(entry, now_s)
            return entry if entry.placements else None
        return entry

    def access(self, key: bytes, now_s: float) -> StoredObject | None:
        """As get, and leases it."""
        entry = self.get(key, now_s) if self._shards_to_sweep else self._objects.get(key)
        if entry is not None:
            entry.lease_until_s = now_s + self._lease_s
            if not (entry.num_pins or entry.hard_pinned):
                self.policy.on_access(entry)
        return entry

    def insert(self, put: PendingPut) -> None:
        """Makes a finished put visible."""
        entry = StoredObject(put.key, put.nbytes, put.generation, put.placements)
        entry.hard_pinned = put.pinned
        self._objects[put.key] = entry
        self._num_objects += 1
        if entry.evictable:
            self.policy.on_insert(entry)
        self.fates.forget(put.key)
        self._changes[put.key] = True
        self.counters["stored"] += 1

    def remove(self, key: bytes, force: bool, now_s: float) -> bool:
        entry = self.get(key, now_s)
        if entry is None:
            return True
        if not force and (not entry.evictable or entry.lease_until_s > now_s):
            return False
        self.counters["removed"] += 1
        self._drop(entry, Fate.REMOVED, now_s)
        return True

    def quarantine(self, key: bytes, generation: int, segment: str, now_s: float) -> bool:
        """Never hands that replica out again. False when the object is gone or replaced."""
        entry = self.get(key, now_s)
        if entry is None or entry.generation != generation:
            return False
        bad = [each for each in entry.placements if each.segment == segment]
        if not bad:
            return False
        self.counters["corrupt_replicas"] += len(bad)
        entry.placements = tuple(each for each in entry.placements if each.segment != segment)
        self._space.retire(entry, bad, now_s)
        if not entry.placements:
            self._drop(entry, Fate.CORRUPT, now_s)
        return True

    # pins

    def pin(self, connection: int, key: bytes, now_s: float) -> bool:
        entry = self.get(key, now_s)
        if entry is None:
            return False
        if entry.evictable:
            self.policy.on_remove(entry)
        self.pins.add(connection, entry)
        return True

    def unpin(self, connection: int, key: bytes, now_s: float) -> None:
        entry = self.pins.remove(connection, key)
        if entry is not None:
            self._unpinned(entry, now_s)

    def unpin_all(self, connection: int, now_s: float) -> None:
        # An object pinned twice comes twice; the second time it has no pins and must not be inserted again.
        for entry in dict.fromkeys(self.pins.remove_all(connection)):
            self._unpinned(entry, now_s)

    def _unpinned(self, entry: StoredObject, now_s: float) -> None:
        if entry.num_pins:
            return
        self._space.on_unpinned(entry, now_s)
        if entry.evictable and self._objects.get(entry.key) is entry:
            self.policy.on_insert(entry)

    # what time and pressure take

    def evict_one(self, fate: Fate, now_s: float, budget: Budget) -> bool:
        """Drops the policy's first object that is not leased. False when the budget ends before there is one."""
        for entry in self.policy.victims():
            if budget.num_objects <= 0:
                return False
            budget.num_objects -= 1
            if entry.lease_until_s <= now_s:
                self.counters["evicted"] += 1
                self._drop(entry, fate, now_s)
                return True
            # A leased one goes to the end, as if it were accessed now: the next call starts behind it.
            self.policy.on_access(entry)
        return False

    def start_sweep(self) -> None:
        """A segment was lost: from here on every shard must be seen once."""
        self._shards_to_sweep = NUM_SHARDS

    def sweep(self, now_s: float, num_objects: int) -> bool:
        """Prunes the objects of some shards, about `num_objects`. True when shards are left."""
        while self._shards_to_sweep and num_objects > 0:
            entries = self._objects.shard(self._shards_to_sweep - 1)
            for entry in entries:
                self._prune(entry, now_s)
            self._shards_to_sweep -= 1
            num_objects -= len(entries)
        return self._shards_to_sweep > 0

    def _prune(self, entry: StoredObject, now_s: float) -> None:
        if not all(map(self._segments.is_alive, entry.placements)):
            entry.placements = tuple(filter(self._segments.is_alive, entry.placements))
            if not entry.placements:
                self.counters["lost"] += 1
                self._drop(entry, Fate.NODE_GONE, now_s)

    def _drop(self, entry: StoredObject, fate: Fate, now_s: float) -> None:
        """Takes the object out and sends its space on its way back."""
        del self._objects[entry.key]
        self._num_objects -= 1
        if entry.evictable:
            self.policy.on_remove(entry)
        self._space.retire(entry, entry.placements, now_s)
        self.fates.record(entry.key, fate, now_s)
        self._changes[entry.key] = False

    # for listeners

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]] | None:
        """Keys (stored, removed) since the last call, each in one of the two; None when nothing changed."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        stored = tuple(key for key, is_stored in changes.items() if is_stored)
        return stored, tuple(key for key, is_stored in changes.items() if not is_stored)

    def snapshot(self) -> Iterator[tuple[bytes, ...]]:
        """All keys in parts. With the changes taken after the first part was asked for, the picture is whole."""
        for index in range(NUM_SHARDS):
            keys = tuple(entry.key for entry in self._objects.shard(index))
            if keys:
                yield keys
