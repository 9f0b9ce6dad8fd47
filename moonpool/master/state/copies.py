"""One more replica of an object in DRAM: for promotion, for hot keys, for tasks. Pure.

The node that gets the replica makes it. Its space belongs to the order until the node has answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from moonpool.base.errors import Corrupt, DeadlineExceeded, NotFound, PeerLost
from moonpool.master.rules import PoolRules
from moonpool.master.state.generations import Generations
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.orders import OpenOrder, OrderBook
from moonpool.master.state.removal_reasons import RemovalReason
from moonpool.master.state.segments import Place, SegmentTable
from moonpool.master.state.space import SpaceReturns
from moonpool.master.state.table import Replica
from moonpool.store.messages import OrderKind, OrderResult, Placement, Refusal

Then = Callable[[bytes, Refusal | None, float], None]


class Copies:
    def __init__(
        self,
        rules: PoolRules,
        index: ObjectIndex,
        segments: SegmentTable,
        space: SpaceReturns,
        orders: OrderBook,
        generations: Generations,
    ) -> None:
        self._rules = rules
        self._index = index
        self._segments = segments
        self._space = space
        self._orders = orders
        self._generations = generations
        self._targets: dict[int, tuple[Place, int, Then | None]] = {}  # by generation
        self._busy: set[bytes] = set()  # keys that are being copied
        self.on_record_spoilt: Callable[[bytes, int], None] = lambda key, generation: None

    def start(
        self,
        slot: int,
        now_s: float,
        *,
        preferred: Sequence[str] = (),
        avoid_nodes: Sequence[str] = (),
        then: Then | None = None,
    ) -> bool:
        """Orders a copy. False when one is under way, there is no space, or nothing to copy from."""
        key, nbytes = self._index.table.keys[slot], self._index.table.nbytes[slot]
        assert key is not None
        sources = self._index.placements(slot)
        if key in self._busy or not sources:
            return False
        places = self._segments.place_many([nbytes], 1, preferred, avoid_nodes)[0]
        if not places:
            return False
        number, offset = places[0]
        segment = self._segments.by_number[number]
        generation = self._generations.take()
        target = Placement(segment.name, offset, segment.incarnation, generation)
        self._targets[generation] = (places[0], nbytes, then)
        self._busy.add(key)
        version = self._index.table.version[slot]
        self._orders.give(segment.node, OrderKind.COPY, key, nbytes, version, sources[0], target, self._on_done, now_s)
        return True

    def is_busy(self, key: bytes) -> bool:
        return key in self._busy

    def spans(self) -> Iterator[tuple[Place, int]]:
        """Space granted to copies that are under way."""
        for place, nbytes, _ in self._targets.values():
            yield place, nbytes

    def _on_done(self, opened: OpenOrder, result: OrderResult, now_s: float) -> None:
        order = opened.order
        assert order.target is not None
        generation = order.target.generation
        place, nbytes, then = self._targets.pop(generation)
        self._busy.discard(order.key)
        refusal = result.refusal
        slot = self._index.table.find(order.key)
        alive = slot is not None and self._index.table.version[slot] == opened.version
        if refusal is not None and refusal.code in (DeadlineExceeded.code, PeerLost.code):
            # The node may be writing there even now.
            self._space.rest_put(generation, [place], nbytes, now_s + self._rules.put_release_s)
        elif refusal is not None:
            self._space.rest([place], nbytes, now_s, now_s)
        elif slot is None or not alive or place[0] not in self._segments.by_number:
            self._space.rest([place], nbytes, now_s, now_s)
            refusal = _GONE
        else:
            self._index.set_dram(slot, [*self._index.table.dram_replicas(slot), Replica(*place, generation)])
            self._index.wake(slot)
        if refusal is not None and refusal.code == Corrupt.code:
            source = order.source
            self.quarantine(order.key, source.generation, source.segment, source.offset, now_s)
        if then is not None:
            then(order.key, refusal, now_s)

    def quarantine(self, key: bytes, generation: int, segment: str, offset: int, now_s: float) -> bool:
        """Never hands that replica out again. False when the object has no such replica (any more), or it was moved.

        An object that has another one only on an SSD that is away waits for it.
        """
        index, table, by_number = self._index, self._index.table, self._segments.by_number
        slot = index.find(key, now_s)
        if slot is None:
            return False

        def is_bad(each: Replica) -> bool:
            at = by_number.get(each.segment)
            there = (each.generation, each.offset) == (generation, offset)
            return there and at is not None and at.name == segment

        bad = [each for each in table.dram_replicas(slot) if is_bad(each)]
        ssd = table.ssd_replica(slot)
        on_ssd = ssd is not None and is_bad(ssd)
        if not bad and not on_ssd:
            return False
        index.counters["corrupt_replicas"] += 1
        if len(bad) + on_ssd == len(table.dram_replicas(slot)) + (ssd is not None):
            index.drop(slot, RemovalReason.CORRUPT, now_s)
        elif on_ssd:
            self.on_record_spoilt(key, generation)
            index.drop_ssd(slot, now_s)
        else:
            index.drop_replicas(slot, bad, now_s)
        return True


_GONE = Refusal(NotFound.code, "the object was removed or replaced meanwhile")
