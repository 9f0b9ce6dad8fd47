"""The objects with their replicas, pins, eviction order, removal reasons, changes and records. Pure.

Every change of an object goes through here, so that these agree. index.py finds objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from zlib import crc32

from moonpool.master.policies.base import EvictionPolicy
from moonpool.master.rules import PoolRules
from moonpool.master.state.changes import ChangeLog, RemovalLog, RemovalReason
from moonpool.master.state.pins import PinnedObject, PinTable
from moonpool.master.state.records import Outcomes, Pinned, Unpinned, Viewed
from moonpool.master.state.segments import Place, SegmentTable
from moonpool.master.state.space import PoolSpace
from moonpool.master.state.table import KEPT, UNKNOWN_OFFSET, Flag, ObjectTable, Replica
from moonpool.store.messages import Placement, Tier

# Pin owners below this are connections, whose pins end with them and with the master; others are client sessions.
FIRST_SESSION = 2**32
_TIERS = tuple(Tier(bits) for bits in range(4))  # making a Tier takes a microsecond


class PoolObjects:
    def __init__(
        self, rules: PoolRules, segments: SegmentTable, space: PoolSpace, policy: EvictionPolicy, outcomes: Outcomes
    ) -> None:
        self.table = ObjectTable(rules.max_objects)
        self.removals = RemovalLog(rules.max_fates)
        self.changes = ChangeLog()
        self.policy = policy
        self.pins = PinTable()
        self.outcomes = outcomes
        counted = "stored removed evicted evicted_ssd corrupt_replicas lost hot_replicas hot_dropped"
        self.counters = dict.fromkeys(counted.split(), 0)
        self.on_record_unwanted: Callable[[bytes, int, Replica, float], None] = lambda key, nbytes, replica, now_s: None
        # Called with key, size, DRAM replicas that left the object, and until when a reader may remember them.
        self.on_replicas_left: Callable[[bytes, int, Sequence[Replica], float, float], None] = lambda *_: None
        self.all_were_ordered = True  # every object has been in the eviction order: the policy may be given any slot
        self._segments = segments
        self._space = space

    def __len__(self) -> int:
        """Return the number of objects that can be read."""
        return len(self.table) - self.table.num_dormant

    # where objects are

    def placements(self, slot: int) -> tuple[Placement, ...]:
        """Return the replicas that can be read, memory before disk."""
        table, by_number = self.table, self._segments.by_number
        found: list[Placement] = []
        number = table.dram_segment[slot]
        if number and (segment := by_number.get(number)) is not None:
            at = segment.descriptor
            found.append(Placement(at.name, table.dram_offset[slot], at.incarnation, table.dram_generation[slot]))
        if table.flags[slot] & Flag.EXTRA:
            found += [self.placement(each) for each in table.extras[slot] if each.segment in by_number]
        ssd = table.ssd_segment[slot]
        if ssd and self.is_on_live_ssd(slot):
            found.append(self.placement(Replica(ssd, table.ssd_offset[slot], table.ssd_generation[slot])))
        return tuple(found)

    def placement(self, replica: Replica) -> Placement:
        at = self._segments.by_number[replica.segment].descriptor
        return Placement(at.name, replica.offset, at.incarnation, replica.generation)

    def tier(self, slot: int) -> Tier:
        """Return the tiers from which the object can be read now."""
        table, by_number = self.table, self._segments.by_number
        in_dram = table.dram_segment[slot] in by_number
        if not in_dram and table.flags[slot] & Flag.EXTRA:
            in_dram = any(each.segment in by_number for each in table.extras[slot])
        on_ssd = table.ssd_segment[slot] and self.is_on_live_ssd(slot)
        return _TIERS[(1 if in_dram else 0) + (2 if on_ssd else 0)]

    def tiers_of(self, keys: Sequence[bytes]) -> list[Tier]:
        table, by_number = self.table, self._segments.by_number
        nowhere, dram = _TIERS[0], _TIERS[1]
        segments, on_ssd, tier = table.dram_segment, table.ssd_segment, self.tier
        return [
            nowhere if slot is None else (dram if segments[slot] in by_number and not on_ssd[slot] else tier(slot))
            for slot in table.find_many(keys)
        ]

    def nodes_of(self, keys: Sequence[bytes]) -> tuple[tuple[str, int], ...]:
        """Return (node, number of keys) for each run of keys whose first replica in memory is on one node; "" without
        one."""
        if not keys:
            return ()
        by_number, segments = self._segments.by_number, self.table.dram_segment
        found = [by_number.get(0 if slot is None else segments[slot]) for slot in self.table.find_many(keys)]
        runs = groupby("" if each is None else each.node for each in found)
        return tuple([(node, len(list(run))) for node, run in runs])

    def is_on_live_ssd(self, slot: int) -> bool:
        """Return whether the object can be read from an SSD now."""
        segment = self._segments.by_number.get(self.table.ssd_segment[slot])
        return segment is not None and not segment.is_away and self.table.ssd_offset[slot] != UNKNOWN_OFFSET

    def has_record(self, slot: int) -> bool:
        """Return whether the object is known to be on an SSD, mounted or away."""
        return bool(self.table.ssd_segment[slot]) and self.table.ssd_offset[slot] != UNKNOWN_OFFSET

    def _make_evictable(self, slot: int) -> None:
        """Insert the object into the eviction order."""
        table = self.table
        self.policy.insert(slot, table.parent_slot(slot), table.nbytes[slot], crc32(table.key(slot)))

    # adding and removing

    def insert(
        self,
        key: bytes,
        nbytes: int,
        dram: Sequence[Replica],
        version: int,
        flags: int = 0,
        identity: int = 0,
        parent: int | None = None,
    ) -> int:
        """Add an object under a key that has none. Return its slot. The caller writes the journal record; the object's
        space is counted already.
        """
        table = self.table
        slot = table.add(key, nbytes)
        table.version[slot] = version
        if flags:
            table.flags[slot] = flags
        if identity:
            table.identity[slot] = identity
        if dram:
            table.set_dram(slot, dram)
            if not flags & KEPT:
                self.policy.insert(slot, parent, nbytes, crc32(key))
        if not dram or flags & KEPT:
            self.all_were_ordered = False
        if parent is not None:
            table.parent[slot], table.child[parent] = parent + 1, slot + 1
        self.removals.forget(key)
        self.changes.stored(key)
        self.counters["stored"] += 1
        return slot

    def insert_plain(
        self,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        generations: Sequence[int],
        places: Sequence[Place],
        identities: Sequence[int],
        parents: Sequence[bytes] | None,
    ) -> list[int]:
        """Do insert() for objects with one replica and no flags, parents before children, eight times as fast. An empty
        parent is none. Return the slots.
        """
        table = self.table
        slots = table.add_many(keys)
        table.fill(
            slots,
            {
                "nbytes": sizes,
                "version": generations,
                "dram_segment": [number for number, _ in places],
                "dram_offset": [offset for _, offset in places],
                "dram_generation": generations,
                "identity": identities,
            },
        )
        parent_slots = None if parents is None else table.find_many(parents)
        for slot, parent in zip(slots, parent_slots or (), strict=False):
            if parent is not None:
                table.parent[slot], table.child[parent] = parent + 1, slot + 1
        self.policy.insert_many(slots, parent_slots, list(map(crc32, keys)))
        self.removals.forget_many(keys)
        self.changes.stored_many(keys)
        self.counters["stored"] += len(keys)
        return slots

    def drop(
        self, slot: int, reason: RemovalReason, now_s: float, *, is_void: bool = False, is_written: bool = False
    ) -> None:
        """Remove the object, and free its space when its leases and pins end. `is_void`: its replicas are void.
        `is_written`: a client whose grant the journal lost may write to its space until then.
        """
        table = self.table
        key, nbytes, flags = table.keys[slot], table.nbytes[slot], table.flags[slot]
        assert key is not None
        if table.dram_segment[slot]:
            if not flags & KEPT:
                self.policy.remove(slot)
            replicas = table.dram_replicas(slot)
            places = [(each.segment, each.offset) for each in replicas]
            if not is_void:
                self.void(slot, replicas, now_s)
        else:
            places = []
        if table.ssd_segment[slot]:
            self.release_ssd(slot, now_s)
        if flags & Flag.PINNED:
            self.pins.detach(slot, places, table.lease_until_s[slot])
            self.outcomes.add(Viewed(key, places, nbytes, ended=True))
        else:
            self._free(slot, places, now_s, is_written)
        if not flags & Flag.DORMANT:
            self.changes.removed(key)
        table.discard(slot)
        self.removals.record(key, reason, now_s)
        self.outcomes.dropped(key, reason)

    def drop_replicas(self, slot: int, gone: Iterable[Replica], now_s: float, *, is_written: bool = False) -> None:
        """Remove some DRAM replicas of an object that has other replicas, perhaps only on an SSD that is away.
        `is_written`: as in drop().
        """
        table = self.table
        gone = list(gone)
        places: list[Place] = [(each.segment, each.offset) for each in gone]
        if table.flags[slot] & Flag.PINNED:
            self.pins.keep(slot, places, table.lease_until_s[slot])
            self.outcomes.add(Viewed(table.key(slot), places, table.nbytes[slot], ended=False))
        else:
            self._free(slot, places, now_s, is_written)
        self.void(slot, gone, now_s)
        self.set_dram(slot, [each for each in table.dram_replicas(slot) if each not in gone])
        if not self.tier(slot):
            self.mark_dormant(slot)

    def _free(self, slot: int, places: Sequence[Place], now_s: float, is_written: bool) -> None:
        """Free space of the object when its lease ends."""
        until_s, nbytes = self.table.lease_until_s[slot], self.table.nbytes[slot]
        if is_written and places:
            self._space.keep_unknown(until_s, places, nbytes)
        else:
            self._space.free_at(until_s, places, nbytes, now_s)

    def void(self, slot: int, gone: Sequence[Replica], now_s: float) -> None:
        """Report replicas that leave the object while a reader may remember them."""
        until_s = self.table.lease_until_s[slot]
        if until_s > now_s:
            self.on_replicas_left(self.table.key(slot), self.table.nbytes[slot], gone, until_s, now_s)

    def lose_replicas(
        self, slot: int, lost: Sequence[Replica], reason: RemovalReason, until_s: float, now_s: float
    ) -> None:
        """Remove DRAM replicas that another process may overwrite until `until_s`. Their space is freed no earlier, by
        the next master too; except for space that is viewed, which the next master frees with the last view.
        """
        lease_until_s = self.table.lease_until_s[slot]
        self.table.lease_until_s[slot] = max(lease_until_s, until_s)  # their space is freed then
        if len(lost) == len(self.table.dram_replicas(slot)) and not self.table.ssd_segment[slot]:
            self.drop(slot, reason, now_s, is_written=True)
        else:
            self.drop_replicas(slot, lost, now_s, is_written=True)
            self.table.lease_until_s[slot] = lease_until_s

    def drop_hot_replicas(self, slot: int, now_s: float) -> None:
        """Remove the replicas that the object has for the readers of a hot key. Their space is free when no reader can
        use it any more: now if the object is neither leased nor pinned.
        """
        mark = self.table.hot.get(slot)
        if mark is not None:
            gone = [each for each in self.table.extras[slot] if each.generation in mark.generations]
            self.counters["hot_dropped"] += len(gone)
            self.drop_replicas(slot, gone, now_s)

    def set_dram(self, slot: int, replicas: Sequence[Replica], *, hot: int | None = None) -> None:
        """Replace the DRAM replicas. The caller frees the space of those that are gone. `hot` is the generation of one
        that was made for the readers of a hot key; if the object has lost all others meanwhile, it is not extra.
        """
        table = self.table
        before = bool(table.dram_segment[slot])
        table.set_dram(slot, replicas)
        if hot is not None:
            table.set_hot(slot, {hot, *(table.hot[slot].generations if slot in table.hot else ())})
            self.counters["hot_replicas"] += 1
        kept = table.flags[slot] & KEPT
        if before and not replicas and not kept:
            self.policy.remove(slot)
        elif replicas and not before and not kept:
            self._make_evictable(slot)
        if before is bool(replicas):
            self.changes.moved(table.key(slot))
        else:
            self.tier_changed(slot)
        self.outcomes.placed(self.table, slot)

    def set_ssd(self, slot: int, replica: Replica | None) -> None:
        """Replace the SSD record, or remove it (None)."""
        table = self.table
        if table.ssd_segment[slot]:
            self._segments.count_ssd(table.ssd_segment[slot], table.nbytes[slot], -1)
        table.set_ssd(slot, replica)
        if replica is not None:
            self._segments.count_ssd(replica.segment, table.nbytes[slot], +1)
        self.tier_changed(slot)
        self.outcomes.placed(self.table, slot)

    def move_ssd(self, slot: int, offset: int) -> None:
        """Set the offset of the object's SSD record, which was moved or unknown."""
        self.table.ssd_offset[slot] = offset
        self.outcomes.placed(self.table, slot)

    def release_ssd(self, slot: int, now_s: float) -> None:
        """Remove the object's SSD record and order its node to drop it. The caller writes the journal record."""
        key, replica = self.table.key(slot), self.table.ssd_replica(slot)
        assert replica is not None
        self._segments.count_ssd(replica.segment, self.table.nbytes[slot], -1)
        self.table.set_ssd(slot, None)
        self.on_record_unwanted(key, self.table.nbytes[slot], replica, now_s)

    def drop_ssd(self, slot: int, now_s: float) -> None:
        """Remove the SSD record of an object that is in DRAM too."""
        self.release_ssd(slot, now_s)
        self.tier_changed(slot)
        self.outcomes.placed(self.table, slot)

    def tier_changed(self, slot: int) -> None:
        """Report other tiers to listeners, for which a dormant object does not exist."""
        if not self.table.flags[slot] & Flag.DORMANT:
            self.changes.tier(self.table.key(slot))

    # pins

    def pin(self, owner: int, slot: int) -> None:
        table, key = self.table, self.table.key(slot)
        if self.pins.add(owner, key, slot, table.nbytes[slot]):
            table.flags[slot] |= Flag.PINNED
        if owner >= FIRST_SESSION:
            self.outcomes.add(Pinned(owner, [key]))

    def unpin(self, owner: int, key: bytes, now_s: float) -> None:
        ended = self.pins.remove(owner, key)
        if ended is not None:
            self._unpinned(ended, now_s)
        if owner >= FIRST_SESSION:
            self.outcomes.add(Unpinned(owner, [key]))

    def unpin_all(self, owner: int, now_s: float) -> None:
        for ended in self.pins.remove_all(owner):
            self._unpinned(ended, now_s)

    def _unpinned(self, pinned: PinnedObject, now_s: float) -> None:
        """Handle the end of an object's last pin."""
        self._space.free_at(pinned.free_at_s, pinned.left, pinned.nbytes, now_s)
        slot = pinned.slot
        if slot is not None:
            self.table.flags[slot] &= ~Flag.PINNED

    # being readable

    def mark_dormant(self, slot: int) -> None:
        """Mark an object none of whose replicas can be read for now."""
        if not self.table.flags[slot] & Flag.DORMANT:
            self.table.set_dormant(slot, True)
            self.changes.removed(self.table.key(slot))

    def mark_readable(self, slot: int) -> None:
        """Mark an object as readable (again)."""
        table = self.table
        if table.flags[slot] & Flag.DORMANT:
            table.set_dormant(slot, False)
            if table.dram_segment[slot] and not table.flags[slot] & KEPT:
                self._make_evictable(slot)
            self.changes.stored(table.key(slot))
