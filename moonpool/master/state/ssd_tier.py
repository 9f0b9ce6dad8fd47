"""DRAM over SSD: what is written behind, what comes back, what goes. Pure.

Every object on a node with an SSD is offloaded in the order it was stored, as fast as the node takes it. An object on
SSD alone comes back to DRAM when it is looked up repeatedly, and brings the next blocks of its prefix along. Above the
SSD's watermark the oldest records go that nobody used since they were passed by last (a clock).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import Corrupt, DeadlineExceeded, NoSpace, Overloaded, Unavailable
from moonpool.master.rules import PoolRules
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.losses import UNKNOWN_OFFSET
from moonpool.master.state.orders import Copies, OpenOrder, OrderBook
from moonpool.master.state.segments import MountedSegment, SegmentTable
from moonpool.master.state.table import Flag, Replica
from moonpool.store.messages import (
    GRANULE_NBYTES,
    Doubt,
    HeldItem,
    Order,
    OrderKind,
    OrderResult,
    Placement,
    Tier,
    num_granules,
)

_MAX_TRACKED_HITS = 50_000
_STALL_S = 1.0  # before a disk that refused is asked again
_TRY_AGAIN = (NoSpace.code, Unavailable.code, Overloaded.code, DeadlineExceeded.code)


class _Shelf:
    """One SSD segment: objects that wait to be written, and records in the order they came."""

    __slots__ = ("clock", "in_flight", "stalled_until_s", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, int]] = deque()  # (slot, version)
        self.clock: deque[tuple[int, int]] = deque()  # (slot, generation of the record)
        self.in_flight = 0
        self.stalled_until_s = 0.0  # its disk refused; tried again then


class SsdTier:
    def __init__(
        self, rules: PoolRules, index: ObjectIndex, segments: SegmentTable, orders: OrderBook, copies: Copies
    ) -> None:
        self._rules = rules
        self._index = index
        self._segments = segments
        self._orders = orders
        self._copies = copies
        self._shelves: dict[int, _Shelf] = {}  # by segment number
        self._shelf_of_node: dict[str, int] = {}
        self._hits: dict[int, int] = {}  # look-ups by the object's version, of objects on SSD alone
        self._dropping: set[tuple[bytes, int]] = set()  # records that nodes were told to forget
        # By slot, after a restart: the journal has the record, and its node has not named it yet.
        self._unconfirmed: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.counters = dict.fromkeys(("offloaded", "promoted", "ssd_hits", "offload_failures"), 0)
        self._spoilt: set[tuple[bytes, int]] = set()  # records of objects in DRAM that are to be written once more
        index.on_record_unwanted = self._on_record_unwanted
        copies.on_record_spoilt = lambda key, generation: self._spoilt.add((key, generation))

    @property
    def is_used(self) -> bool:
        return bool(self._shelves)

    # segments

    def on_mounted(self, segment: MountedSegment) -> None:
        """What waited for the node's SSD waits for this one."""
        shelf = self._shelves[segment.number] = _Shelf()
        earlier = self._shelves.get(self._shelf_of_node.get(segment.node, 0))
        if earlier is not None:
            shelf.waiting, earlier.waiting = earlier.waiting, deque()
        self._shelf_of_node[segment.node] = segment.number

    def on_ended(self, segment: MountedSegment) -> None:
        self._shelves.pop(segment.number, None)
        if self._shelf_of_node.get(segment.node) == segment.number:
            del self._shelf_of_node[segment.node]

    # down

    def on_stored(self, slots: Sequence[int]) -> None:
        """New objects in DRAM: they wait for the SSD of a node that has them."""
        table = self._index.table
        for slot in slots:
            number = self._shelf_for(slot)
            if number is not None and not self._index.has_record(slot):
                table.flags[slot] |= Flag.WAITING
                self._shelves[number].waiting.append((slot, table.version[slot]))

    def _shelf_for(self, slot: int) -> int | None:
        for replica in self._index.table.dram_replicas(slot):
            segment = self._segments.by_number.get(replica.segment)
            number = None if segment is None else self._shelf_of_node.get(segment.node)
            if number is not None and self._segments.is_live(number):
                return number
        return None

    def pump(self, now_s: float) -> None:
        """Gives offload orders, as many as may be under way."""
        for number, shelf in self._shelves.items():
            segment = self._segments.by_number.get(number)
            if segment is None or not segment.takes_new or now_s < shelf.stalled_until_s:
                continue
            for _ in range(min(len(shelf.waiting), self._rules.step_objects)):
                if shelf.in_flight >= self._rules.offloads_in_flight or self._lacks_room(segment, shelf):
                    break
                self._offload(segment, shelf, *shelf.waiting.popleft(), now_s)

    def _lacks_room(self, segment: MountedSegment, shelf: _Shelf) -> bool:
        """Whether the next object has to wait for others to go."""
        nbytes = self._next_nbytes(shelf)
        if nbytes > segment.capacity_nbytes:
            return False  # no use in waiting
        # Those under way are about as large.
        return segment.used_nbytes + nbytes * (1 + shelf.in_flight) > segment.capacity_nbytes

    def _next_nbytes(self, shelf: _Shelf) -> int:
        """How much the next object takes; 0 when there is none, or it is not there any more."""
        if not shelf.waiting or not self._waits(*shelf.waiting[0]):
            return 0
        return num_granules(self._index.table.nbytes[shelf.waiting[0][0]]) * GRANULE_NBYTES

    def _waits(self, slot: int, version: int) -> bool:
        table = self._index.table
        return table.keys[slot] is not None and table.version[slot] == version and not self._index.has_record(slot)

    def _offload(self, segment: MountedSegment, shelf: _Shelf, slot: int, version: int, now_s: float) -> None:
        table = self._index.table
        key, nbytes = table.keys[slot], table.nbytes[slot]
        if key is None or not self._waits(slot, version):
            return
        table.flags[slot] &= ~Flag.WAITING
        if nbytes > segment.capacity_nbytes:
            return
        mine = [
            each
            for each in table.dram_replicas(slot)
            if (at := self._segments.by_number.get(each.segment)) is not None and at.node == segment.node
        ]
        if not mine:
            self.on_stored([slot])  # it moved to another node
            return
        table.flags[slot] |= Flag.WAITING
        shelf.in_flight += 1
        source = self._index.placement(mine[0])
        target = Placement(segment.name, 0, segment.incarnation, source.generation)
        kind, on_done = OrderKind.OFFLOAD, self._on_offloaded
        self._orders.give(segment.node, kind, key, nbytes, version, source, target, on_done, now_s)

    def _on_offloaded(self, opened: OpenOrder, result: OrderResult, now_s: float) -> None:
        order, index = opened.order, self._index
        assert order.target is not None
        segment = self._segments.find(order.target.segment, order.target.incarnation)
        shelf = None if segment is None else self._shelves.get(segment.number)
        if segment is None or shelf is None:
            return
        shelf.in_flight -= 1
        slot = index.table.find(order.key)
        waits = slot is not None and self._waits(slot, opened.version)
        if result.refusal is not None or result.offset is None:
            code = "" if result.refusal is None else result.refusal.code
            self._not_offloaded(shelf, order, code, slot if waits else None, now_s)
            return
        record = Replica(segment.number, result.offset, order.source.generation)
        if slot is not None and waits:
            self.counters["offloaded"] += 1
            self._attach(slot, record)
        elif slot is not None and self._is_record_of(slot, segment, record.generation):
            index.move_ssd(slot, record.offset)  # an inventory told of it, and the order was carried out again
        else:
            self._on_record_unwanted(order.key, order.nbytes, record, now_s)

    def _not_offloaded(self, shelf: _Shelf, order: Order, code: str, slot: int | None, now_s: float) -> None:
        """`slot` is the object's if it waits still."""
        table = self._index.table
        self.counters["offload_failures"] += 1
        if slot is not None and code in _TRY_AGAIN:
            shelf.stalled_until_s = now_s + _STALL_S
            shelf.waiting.appendleft((slot, table.version[slot]))
        elif slot is not None:
            table.flags[slot] &= ~Flag.WAITING
        if code == Corrupt.code:
            source = order.source
            self._copies.quarantine(order.key, source.generation, source.segment, source.offset, now_s)
        slot = table.find(order.key)
        if slot is not None and order.source not in self._index.placements(slot):
            self._store_again(order.key)  # from another replica

    def _attach(self, slot: int, record: Replica) -> None:
        self._index.table.flags[slot] &= ~Flag.WAITING
        self._index.set_ssd(slot, record)
        self._confirm(slot)
        self._shelves[record.segment].clock.append((slot, record.generation))

    def evict(self, now_s: float, limit: int) -> bool:
        """Drops records of SSDs above their watermark, or too full for the next object. True when there is more to
        do.
        """
        more = False
        for number, shelf in list(self._shelves.items()):
            segment = self._segments.by_number.get(number)
            if segment is None or segment.is_away:
                continue
            watermark = int(self._rules.ssd_high_watermark * segment.capacity_nbytes)
            target, before = min(watermark, segment.capacity_nbytes - self._next_nbytes(shelf)), segment.used_nbytes
            looked_at = 0
            while segment.used_nbytes > max(target, 0) and shelf.clock and looked_at < limit:
                looked_at += 1
                self._pass_by(number, shelf, *shelf.clock.popleft(), now_s)
            more = more or (looked_at >= limit and segment.used_nbytes < before)
        return more

    def _pass_by(self, number: int, shelf: _Shelf, slot: int, generation: int, now_s: float) -> None:
        table = self._index.table
        if table.keys[slot] is None or table.ssd_segment[slot] != number or table.ssd_generation[slot] != generation:
            return  # the record is gone
        grouped = table.flags[slot] & Flag.GROUPED
        members = sorted(table.groups[table.group_of[slot]]) if grouped else [slot]
        kept = [each for each in members if self._is_kept(each, now_s)]  # every one is passed by
        if kept:
            shelf.clock.append((slot, generation))
            return
        for each in members:
            self._evict_one(each, now_s)

    def _is_kept(self, slot: int, now_s: float) -> bool:
        """Clears the mark that it was used."""
        table, flags = self._index.table, self._index.table.flags[slot]
        table.flags[slot] = flags & ~Flag.USED
        return bool(flags & (Flag.HARD_PIN | Flag.PINNED | Flag.USED)) or table.lease_until_s[slot] > now_s

    def _evict_one(self, slot: int, now_s: float) -> None:
        index, table = self._index, self._index.table
        if not table.ssd_segment[slot]:
            return
        index.counters["evicted_ssd"] += 1
        if table.dram_segment[slot]:
            index.drop_ssd(slot, now_s)
        else:
            index.drop(slot, RemovalReason.SSD_EVICTED, now_s)

    def _on_record_unwanted(self, key: bytes, nbytes: int, record: Replica, now_s: float) -> None:
        """The node forgets the record; one that is away learns it when it shows its inventory."""
        segment = self._segments.by_number.get(record.segment)
        if segment is None or segment.is_away:
            self._spoilt.discard((key, record.generation))
        else:
            source = Placement(segment.name, record.offset, segment.incarnation, record.generation)
            self._dropping.add((key, record.generation))
            self._orders.give(segment.node, OrderKind.DROP, key, nbytes, 0, source, None, self._on_dropped, now_s)

    def _on_dropped(self, opened: OpenOrder, result: OrderResult, now_s: float) -> None:
        """A record that could not be dropped is refused at the node's next inventory."""
        record = (opened.order.key, opened.order.source.generation)
        self._dropping.discard(record)
        if record in self._spoilt:
            self._spoilt.discard(record)
            if result.refusal is None:  # else the node would take the bad record for the new one
                self._store_again(opened.order.key)

    def _store_again(self, key: bytes) -> None:
        """What is left of an object in DRAM waits for an SSD, unless it does so already."""
        slot = self._index.table.find(key)
        if slot is not None and not self._index.table.flags[slot] & Flag.WAITING:
            self.on_stored([slot])

    # up

    def on_found(self, slots: Sequence[int], now_s: float) -> None:
        """A look-up found these, in the caller's order. Those on SSD alone may come back."""
        table, hits = self._index.table, self._hits
        on_ssd = [slot for slot in slots if not table.dram_segment[slot]]
        for slot in slots:
            if table.ssd_segment[slot]:
                table.flags[slot] |= Flag.USED
        if not on_ssd:
            return
        self.counters["ssd_hits"] += len(on_ssd)
        if not self._rules.promote_after_hits:
            return
        for slot in on_ssd:
            version = table.version[slot]
            hits[version] = hits.get(version, 0) + 1
            if hits[version] >= self._rules.promote_after_hits:
                self._promote(slot, now_s)
        if table.version[slots[-1]] not in hits:  # in DRAM, or on its way there
            self._read_ahead(slots[-1], now_s)
        if len(hits) > _MAX_TRACKED_HITS:
            hits.clear()

    def _read_ahead(self, slot: int, now_s: float) -> None:
        """The blocks that continue this one. A link may be out of date; then a block comes for nothing."""
        table = self._index.table
        for _ in range(self._rules.read_ahead_blocks):
            following = table.child[slot] - 1
            if following < 0 or table.keys[following] is None:
                return
            slot = following
            if not table.dram_segment[slot] and not table.flags[slot] & Flag.DORMANT:
                self._promote(slot, now_s)

    def _promote(self, slot: int, now_s: float) -> None:
        self._hits.pop(self._index.table.version[slot], None)
        segment = self._segments.by_number.get(self._index.table.ssd_segment[slot])
        preferred = () if segment is None else self._dram_of(segment.node)
        if self._copies.start(slot, now_s, preferred=preferred):
            self.counters["promoted"] += 1

    def _dram_of(self, node: str) -> tuple[str, ...]:
        return tuple(each.name for each in self._segments.of_tier(Tier.DRAM) if each.node == node)

    def restore(self) -> None:
        """After a restart: shelves, clocks and what waits, from the table."""
        for segment in self._segments.of_tier(Tier.SSD):
            self.on_mounted(segment)
        table = self._index.table
        self._unconfirmed = table.ssd_segments[: table.end] != 0
        if not self._shelves:
            return
        for slot in table.slots():
            shelf = self._shelves.get(table.ssd_segment[slot])
            if shelf is not None:
                shelf.clock.append((slot, table.ssd_generation[slot]))
        self.on_stored([slot for slot in table.slots() if table.dram_segment[slot]])

    # a node that came back

    def adopt(
        self, segment: MountedSegment, items: Sequence[HeldItem], adopt_unknown: bool, now_s: float
    ) -> list[bool]:
        """Records that the node found in its log. False where one is not wanted."""
        return [self._adopt(segment, item, adopt_unknown, now_s) for item in items]

    def _adopt(self, segment: MountedSegment, item: HeldItem, adopt_unknown: bool, now_s: float) -> bool:
        index, table = self._index, self._index.table
        record = Replica(segment.number, item.offset, item.generation)
        slot = table.find(item.key)
        if (item.key, item.generation) in self._dropping:
            return False
        if slot is None:
            if not adopt_unknown or item.doubt is not Doubt.NONE or table.is_full:
                return False
            slot = index.insert(item.key, item.nbytes, (), item.generation)
        else:
            expected = {each.generation for each in table.dram_replicas(slot)}
            if table.ssd_segment[slot]:
                expected.add(table.ssd_generation[slot])
            mine = self._is_record_of(slot, segment, item.generation)
            elsewhere = (
                table.ssd_segment[slot] != segment.number and table.ssd_segment[slot] and index.tier(slot) & Tier.SSD
            )
            if item.generation not in expected or item.nbytes != table.nbytes[slot] or elsewhere:
                return False
            if item.doubt is Doubt.SALVAGED and table.ssd_offset[slot] not in (item.offset, UNKNOWN_OFFSET):
                return False
            if mine and table.ssd_offset[slot] != UNKNOWN_OFFSET:
                index.move_ssd(slot, item.offset)
                self._confirm(slot)
                return True
        self._attach(slot, record)
        index.wake(slot)
        return True

    def on_listed(self, segment: MountedSegment) -> None:
        """The node has named every record. One that the journal alone knows was dropped by order of a master that lost
        power: it is only hoped for from here on, in vain, and an object that is in DRAM is written once more.
        """
        table, end = self._index.table, len(self._unconfirmed)
        lost = np.flatnonzero(self._unconfirmed & (table.ssd_segments[:end] == segment.number))
        self._unconfirmed[lost] = False
        table.ssd_offsets[lost] = UNKNOWN_OFFSET
        self.on_stored([slot for slot in lost.tolist() if table.dram_segment[slot]])

    def _confirm(self, slot: int) -> None:
        if slot < len(self._unconfirmed):
            self._unconfirmed[slot] = False

    def relocated(self, segment: MountedSegment, items: Sequence[tuple[bytes, int, int]]) -> list[bool]:
        """Compaction moved records. False where one is not wanted any more."""
        table, wanted = self._index.table, []
        for key, generation, offset in items:
            slot = table.find(key)
            if slot is not None and self._is_record_of(slot, segment, generation):
                self._index.move_ssd(slot, offset)
                wanted.append(True)
            else:
                wanted.append(False)
        return wanted

    def _is_record_of(self, slot: int, segment: MountedSegment, generation: int) -> bool:
        table = self._index.table
        return bool(table.ssd_segment[slot] == segment.number and table.ssd_generation[slot] == generation)
