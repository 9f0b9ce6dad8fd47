"""The SSD tier: which objects are written to SSD, which come back to DRAM, and which are evicted from SSD. Pure.

Every object on a node with an SSD is offloaded in the order it was stored, as fast as the node writes. An object that
is only on SSD is promoted to DRAM when it is looked up repeatedly, together with the next blocks of its prefix. Above
the SSD's watermark the oldest records that were not used since the last visit are evicted (clock algorithm).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import Corrupt, DeadlineExceeded, NoSpace, Overloaded, StaleGeneration, Unavailable
from moonpool.master.rules import PoolRules
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.orders import Copies, OnCopied, OpenOrder, OrderBook
from moonpool.master.state.segments import MountedSegment, SegmentTable
from moonpool.master.state.space import Generations
from moonpool.master.state.table import UNKNOWN_OFFSET, Flag, Replica
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
_STALL_S = 1.0  # pause after a disk has refused
_RETRIED_CODES = (NoSpace.code, Unavailable.code, Overloaded.code, DeadlineExceeded.code)


class _SsdQueue:
    """One SSD segment: objects that wait to be written, and records in the order they were written."""

    __slots__ = ("clock", "in_flight", "stalled_until_s", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, int]] = deque()  # (slot, version)
        self.clock: deque[tuple[int, int]] = deque()  # (slot, generation of the record)
        self.in_flight = 0
        self.stalled_until_s = 0.0  # its disk refused; retry then


class SsdTier:
    def __init__(
        self,
        rules: PoolRules,
        index: ObjectIndex,
        segments: SegmentTable,
        orders: OrderBook,
        copies: Copies,
        generations: Generations,
    ) -> None:
        self._rules = rules
        self._index = index
        self._segments = segments
        self._orders = orders
        self._copies = copies
        self._generations = generations
        self.queues: dict[int, _SsdQueue] = {}  # by segment number; empty if the pool has no SSD
        self._queue_of_node: dict[str, int] = {}
        self._hits: dict[int, int] = {}  # look-ups by the object's version, of objects on SSD alone
        self._dropping: set[tuple[bytes, int]] = set()  # records with an open DROP order
        # By slot, after a restart: the journal has the record, and its node has not listed it yet.
        self._unconfirmed: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.counters = dict.fromkeys(("offloaded", "promoted", "ssd_hits", "offload_failures"), 0)
        self._corrupt: set[tuple[bytes, int]] = set()  # corrupt records, whose objects are written again from DRAM
        index.on_record_unwanted = self._on_record_unwanted
        copies.on_record_corrupt = lambda key, generation: self._corrupt.add((key, generation))

    # segments

    def on_mounted(self, segment: MountedSegment) -> None:
        """Move what waits for the node's earlier SSD segment to this one."""
        queue = self.queues[segment.number] = _SsdQueue()
        earlier = self.queues.get(self._queue_of_node.get(segment.node, 0))
        if earlier is not None:
            queue.waiting, earlier.waiting = earlier.waiting, deque()
        self._queue_of_node[segment.node] = segment.number

    def on_ended(self, segment: MountedSegment) -> None:
        self.queues.pop(segment.number, None)
        if self._queue_of_node.get(segment.node) == segment.number:
            del self._queue_of_node[segment.node]

    # from DRAM to SSD

    def on_stored(self, slots: Sequence[int]) -> None:
        """Queue new objects in DRAM for the SSD of a node that has them."""
        table = self._index.table
        for slot in slots:
            number = self._queue_for(slot)
            if number is not None and not self._index.has_record(slot):
                table.flags[slot] |= Flag.WAITING
                self.queues[number].waiting.append((slot, table.version[slot]))

    def _queue_for(self, slot: int) -> int | None:
        for replica in self._index.table.dram_replicas(slot):
            segment = self._segments.by_number.get(replica.segment)
            number = None if segment is None else self._queue_of_node.get(segment.node)
            if number is not None and self._segments.is_live(number):
                return number
        return None

    def start_offloads(self, now_s: float) -> None:
        """Order offloads, up to the number that may be under way."""
        for number, queue in self.queues.items():
            segment = self._segments.by_number.get(number)
            if segment is None or not segment.takes_new or now_s < queue.stalled_until_s:
                continue
            for _ in range(min(len(queue.waiting), self._rules.step_objects)):
                if queue.in_flight >= self._rules.offloads_in_flight or self._lacks_room(segment, queue):
                    break
                self._offload(segment, queue, *queue.waiting.popleft(), now_s)

    def _lacks_room(self, segment: MountedSegment, queue: _SsdQueue) -> bool:
        """Return whether the next object has to wait until records are evicted."""
        nbytes = self._next_nbytes(queue)
        if nbytes > segment.capacity_nbytes:
            return False  # waiting would not help
        # Objects under way are about as large.
        return segment.used_nbytes + nbytes * (1 + queue.in_flight) > segment.capacity_nbytes

    def _next_nbytes(self, queue: _SsdQueue) -> int:
        """Return the size of the next object in the queue, 0 if there is none or it is gone."""
        if not queue.waiting or not self._is_waiting(*queue.waiting[0]):
            return 0
        return num_granules(self._index.table.nbytes[queue.waiting[0][0]]) * GRANULE_NBYTES

    def _is_waiting(self, slot: int, version: int) -> bool:
        table = self._index.table
        return table.keys[slot] is not None and table.version[slot] == version and not self._index.has_record(slot)

    def _offload(self, segment: MountedSegment, queue: _SsdQueue, slot: int, version: int, now_s: float) -> None:
        table = self._index.table
        key, nbytes = table.keys[slot], table.nbytes[slot]
        if key is None or not self._is_waiting(slot, version):
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
        source = self._index.placement(mine[0])
        self._order_offload(segment, queue, slot, source, source.generation, now_s)

    def _order_offload(
        self, segment: MountedSegment, queue: _SsdQueue, slot: int, source: Placement, generation: int, now_s: float
    ) -> None:
        table = self._index.table
        table.flags[slot] |= Flag.WAITING
        queue.in_flight += 1
        target = Placement(segment.name, 0, segment.incarnation, generation)
        kind, key, nbytes, version = OrderKind.OFFLOAD, table.key(slot), table.nbytes[slot], table.version[slot]
        self._orders.add(segment.node, kind, key, nbytes, version, source, target, self._on_offloaded, now_s)

    def _on_offloaded(self, opened: OpenOrder, result: OrderResult, now_s: float) -> None:
        order, index = opened.order, self._index
        assert order.target is not None
        segment = self._segments.find(order.target.segment, order.target.incarnation)
        queue = None if segment is None else self.queues.get(segment.number)
        if segment is None or queue is None:
            return
        queue.in_flight -= 1
        slot = index.table.find(order.key)
        waits = slot is not None and self._is_waiting(slot, opened.version)
        if result.refusal is not None or result.offset is None:
            code = "" if result.refusal is None else result.refusal.code
            if slot is not None and waits and self._is_beaten(slot, order, code):
                self._order_offload(segment, queue, slot, order.source, self._generations.issue(), now_s)
            else:
                self._not_offloaded(queue, order, code, slot if waits else None, now_s)
            return
        record = Replica(segment.number, result.offset, order.target.generation)
        if slot is not None and waits:
            self.counters["offloaded"] += 1
            self._attach(slot, record)
        elif slot is not None and self._is_record_of(slot, segment, record.generation):
            index.move_ssd(slot, record.offset)  # the node has carried the order out twice
        else:
            self._on_record_unwanted(order.key, order.nbytes, record, now_s)

    def _is_beaten(self, slot: int, order: Order, code: str) -> bool:
        """Return whether the log has an older object of this key under a higher generation: the client used space that
        was granted before that object's. Then the record needs a generation of its own.
        """
        assert order.target is not None
        is_first = order.target.generation == order.source.generation
        return code == StaleGeneration.code and is_first and order.source in self._index.placements(slot)

    def _not_offloaded(self, queue: _SsdQueue, order: Order, code: str, slot: int | None, now_s: float) -> None:
        """Handle a failed offload. `slot` is the object's if it still waits."""
        table = self._index.table
        self.counters["offload_failures"] += 1
        if slot is not None and code in _RETRIED_CODES:
            queue.stalled_until_s = now_s + _STALL_S
            queue.waiting.appendleft((slot, table.version[slot]))
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
        self.queues[record.segment].clock.append((slot, record.generation))

    def evict(self, now_s: float, limit: int) -> bool:
        """Evict records from SSDs that are above their watermark, or too full for the next object. Return whether there
        is more to do.
        """
        more = False
        for number, queue in list(self.queues.items()):
            segment = self._segments.by_number.get(number)
            if segment is None or segment.is_away:
                continue
            watermark = int(self._rules.ssd_high_watermark * segment.capacity_nbytes)
            target, before = min(watermark, segment.capacity_nbytes - self._next_nbytes(queue)), segment.used_nbytes
            looked_at = 0
            while segment.used_nbytes > max(target, 0) and queue.clock and looked_at < limit:
                looked_at += 1
                self._visit(number, queue, *queue.clock.popleft(), now_s)
            more = more or (looked_at >= limit and segment.used_nbytes < before)
        return more

    def _visit(self, number: int, queue: _SsdQueue, slot: int, generation: int, now_s: float) -> None:
        table = self._index.table
        if table.keys[slot] is None or table.ssd_segment[slot] != number or table.ssd_generation[slot] != generation:
            return  # the record is gone
        members = table.group_members(slot)
        kept = [each for each in members if self._is_kept(each, now_s)]  # clears the marks of all members
        if kept:
            queue.clock.append((slot, generation))
            return
        for each in members:
            self._evict_one(each, now_s)

    def _is_kept(self, slot: int, now_s: float) -> bool:
        """Return whether the record must stay. Clear its mark of use."""
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
        """Order the node to drop the record. A node that is away learns it when it lists its records."""
        segment = self._segments.by_number.get(record.segment)
        if segment is None or segment.is_away:
            self._corrupt.discard((key, record.generation))
        else:
            source = Placement(segment.name, record.offset, segment.incarnation, record.generation)
            self._dropping.add((key, record.generation))
            self._orders.add(segment.node, OrderKind.DROP, key, nbytes, 0, source, None, self._on_dropped, now_s)

    def _on_dropped(self, opened: OpenOrder, result: OrderResult, now_s: float) -> None:
        """If the record could not be dropped, the node's next inventory is refused for it."""
        record = (opened.order.key, opened.order.source.generation)
        self._dropping.discard(record)
        if record in self._corrupt:
            self._corrupt.discard(record)
            if result.refusal is None:  # otherwise the node would take the corrupt record for the new one
                self._store_again(opened.order.key)

    def _store_again(self, key: bytes) -> None:
        """Queue an object that is still in DRAM for an SSD, unless it waits already."""
        slot = self._index.table.find(key)
        if slot is not None and not self._index.table.flags[slot] & Flag.WAITING:
            self.on_stored([slot])

    # from SSD to DRAM

    def on_found(self, slots: Sequence[int], now_s: float) -> None:
        """Count a look-up of these objects, in the caller's order. Promote those that are only on
        SSD and used often.
        """
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
                self.promote(slot, now_s)
        if table.version[slots[-1]] not in hits:  # it is in DRAM, or is being promoted
            self._read_ahead(slots[-1], now_s)
        if len(hits) > _MAX_TRACKED_HITS:
            hits.clear()

    def _read_ahead(self, slot: int, now_s: float) -> None:
        """Promote the blocks that continue this one. A link may be stale; then a block is promoted without use."""
        table = self._index.table
        for _ in range(self._rules.read_ahead_blocks):
            following = table.child[slot] - 1
            if following < 0 or table.keys[following] is None:
                return
            slot = following
            if not table.dram_segment[slot] and not table.flags[slot] & Flag.DORMANT:
                self.promote(slot, now_s)

    def promote(self, slot: int, now_s: float, on_copied: OnCopied | None = None) -> bool:
        """Order a copy in DRAM, on the node that has the record if there is room. Return False as Copies.start()."""
        self._hits.pop(self._index.table.version[slot], None)
        segment = self._segments.by_number.get(self._index.table.ssd_segment[slot])
        node = None if segment is None else segment.node
        preferred = tuple(each.name for each in self._segments.of_tier(Tier.DRAM) if each.node == node)
        is_started = self._copies.start(slot, now_s, preferred=preferred, on_copied=on_copied)
        self.counters["promoted"] += is_started
        return is_started

    def restore(self) -> None:
        """Rebuild the queues and clocks from the table, after a restart."""
        for segment in self._segments.of_tier(Tier.SSD):
            self.on_mounted(segment)
        table = self._index.table
        self._unconfirmed = table.ssd_segments[: table.end] != 0
        if not self.queues:
            return
        for slot in table.slots():
            queue = self.queues.get(table.ssd_segment[slot])
            if queue is not None:
                queue.clock.append((slot, table.ssd_generation[slot]))
        self.on_stored([slot for slot in table.slots() if table.dram_segment[slot]])

    # a node that came back

    def adopt(self, segment: MountedSegment, item: HeldItem, adopt_unknown: bool, now_s: float) -> bool:
        """Take over a record that the node found in its log. Return whether the node should keep it."""
        index, table = self._index, self._index.table
        record = Replica(segment.number, item.offset, item.generation)
        slot = table.find(item.key)
        if (item.key, item.generation) in self._dropping or not _can_hold(segment, item):
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
        index.mark_readable(slot)
        return True

    def on_listed(self, segment: MountedSegment) -> None:
        """The node has listed every record. A record that only the journal has was dropped by order of a master that
        lost power: mark it as lost, and write an object that is in DRAM again.
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
        """Record that compaction moved records. Return for each whether the node should keep it."""
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


def _can_hold(segment: MountedSegment, item: HeldItem) -> bool:
    """Return whether a record of that size can be there at all: what it uses is counted."""
    return 0 < item.nbytes <= segment.capacity_nbytes and item.offset + item.nbytes <= segment.descriptor.nbytes
