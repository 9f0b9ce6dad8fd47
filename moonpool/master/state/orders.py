"""Orders to nodes, and the copies that are made by such orders. Pure.

An order is sent to its node, and sent again when the node reconnects, until the node answers, the order times out, or
the node is gone. Then the callback of the order is called once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from moonpool.base.errors import Corrupt, DeadlineExceeded, NotFound, PeerLost
from moonpool.master.rules import PoolRules
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.index import ObjectIndex
from moonpool.master.state.segments import Place, SegmentTable
from moonpool.master.state.space import PoolSpace
from moonpool.master.state.table import Replica
from moonpool.store.messages import Order, OrderKind, OrderResult, Placement, Refusal

Done = Callable[["OpenOrder", OrderResult, float], None]


class OpenOrder:
    """`version` is the object's version when the order was added."""

    __slots__ = ("deadline_s", "node", "on_done", "order", "version")

    def __init__(self, node: str, order: Order, version: int, deadline_s: float, on_done: Done) -> None:
        self.node = node
        self.order = order
        self.version = version
        self.deadline_s = deadline_s
        self.on_done = on_done


class OrderBook:
    def __init__(self, first_id: int, timeout_s: float) -> None:
        self._next_id = first_id
        self._timeout_s = timeout_s
        self._open: dict[int, OpenOrder] = {}  # oldest first
        self.unsent: dict[str, dict[int, Order]] = {}  # by node; empty if all orders were sent
        self.counters = dict.fromkeys(("orders_done", "orders_failed"), 0)

    def __len__(self) -> int:
        return len(self._open)

    def add(
        self,
        node: str,
        kind: OrderKind,
        key: bytes,
        nbytes: int,
        version: int,
        source: Placement,
        target: Placement | None,
        on_done: Done,
        now_s: float,
    ) -> None:
        order = Order(self._next_id, kind, key, nbytes, source, target)
        self._next_id += 1
        self._open[order.order_id] = OpenOrder(node, order, version, now_s + self._timeout_s, on_done)
        self.unsent.setdefault(node, {})[order.order_id] = order

    def take_unsent(self, node: str) -> list[Order]:
        """Return the node's orders that were not sent yet. They count as sent now."""
        return list(self.unsent.pop(node, {}).values())

    def open_orders(self, node: str) -> list[Order]:
        """Return every open order of a node that (re)connects. They count as sent now."""
        self.unsent.pop(node, None)
        return [each.order for each in self._open.values() if each.node == node]

    def on_results(self, results: Sequence[OrderResult], now_s: float) -> None:
        """Finish these orders. Ignore unknown ones: they have timed out."""
        for result in results:
            opened = self._open.pop(result.order_id, None)
            if opened is not None:
                self._finish(opened, result, now_s)

    def expire(self, now_s: float, limit: int) -> bool:
        """Fail up to `limit` orders that took too long. Return whether there may be more."""
        late: list[OpenOrder] = []
        for each in self._open.values():
            if each.deadline_s > now_s or len(late) == limit:
                break
            late.append(each)
        refusal = Refusal(DeadlineExceeded.code, "the node did not do it in time")
        self._fail(late, refusal, now_s)
        return len(late) == limit

    def node_gone(self, node: str, now_s: float) -> None:
        mine = [each for each in self._open.values() if each.node == node]
        self._fail(mine, Refusal(PeerLost.code, f"node {node!r} is gone"), now_s)

    def _fail(self, orders: Sequence[OpenOrder], refusal: Refusal, now_s: float) -> None:
        for each in orders:
            del self._open[each.order.order_id]
            self._remove_unsent(each)
            self._finish(each, OrderResult(each.order.order_id, refusal), now_s)

    def _remove_unsent(self, opened: OpenOrder) -> None:
        """A failed order must not be sent: its target may belong to another object by then."""
        fresh = self.unsent.get(opened.node)
        if fresh is not None and fresh.pop(opened.order.order_id, None) is not None and not fresh:
            del self.unsent[opened.node]

    def _finish(self, opened: OpenOrder, result: OrderResult, now_s: float) -> None:
        self.counters["orders_done" if result.refusal is None else "orders_failed"] += 1
        opened.on_done(opened, result, now_s)


OnCopied = Callable[[bytes, Refusal | None, float], None]


class _Target(NamedTuple):
    """Where a copy under way is written, and whether it is made for the readers of a hot key."""

    place: Place
    nbytes: int
    on_copied: OnCopied | None
    is_hot: bool


class Copies:
    def __init__(
        self,
        rules: PoolRules,
        index: ObjectIndex,
        segments: SegmentTable,
        space: PoolSpace,
        orders: OrderBook,
    ) -> None:
        self._rules = rules
        self._index = index
        self._segments = segments
        self._space = space
        self._orders = orders
        self._targets: dict[int, _Target] = {}  # by generation
        self._busy: set[bytes] = set()  # keys that are being copied
        self.on_record_corrupt: Callable[[bytes, int], None] = lambda key, generation: None

    def start(
        self,
        slot: int,
        now_s: float,
        *,
        preferred: Sequence[str] = (),
        avoid_nodes: Sequence[str] = (),
        on_copied: OnCopied | None = None,
    ) -> bool:
        """Order one more DRAM replica of the object. Return False if a copy is under way, there is no space, or no
        replica can be read. The space belongs to the order until the node has answered.
        """
        if not self.can_start(slot):
            return False
        nbytes = self._index.table.nbytes[slot]
        (found,) = self._space.place([nbytes], preferred=preferred, avoid_nodes=avoid_nodes)
        if not found:
            return False
        self.start_at(slot, found[0], now_s, on_copied=on_copied)
        return True

    def can_start(self, slot: int) -> bool:
        """Return whether a replica of the object can be read and no copy of it is under way."""
        return self._index.table.key(slot) not in self._busy and bool(self._index.placements(slot))

    def start_at(
        self, slot: int, place: Place, now_s: float, *, on_copied: OnCopied | None, is_hot: bool = False
    ) -> None:
        """Order one more DRAM replica of an object that can_start(), at a place that is allocated for it. `is_hot`: for
        the readers of a hot key.
        """
        key, nbytes = self._index.table.key(slot), self._index.table.nbytes[slot]
        source = self._index.placements(slot)[0]
        generation, (target,) = self._space.stamp_one([place])
        self._targets[generation] = _Target(place, nbytes, on_copied, is_hot)
        self._busy.add(key)
        node, version = self._segments.by_number[place[0]].node, self._index.table.version[slot]
        self._orders.add(node, OrderKind.COPY, key, nbytes, version, source, target, self._on_done, now_s)

    def is_copying(self, key: bytes) -> bool:
        return key in self._busy

    def spans(self) -> Iterator[tuple[Place, int]]:
        """Yield the space granted to copies that are under way."""
        for each in self._targets.values():
            yield each.place, each.nbytes

    def _on_done(self, opened: OpenOrder, result: OrderResult, now_s: float) -> None:
        order = opened.order
        assert order.target is not None
        generation = order.target.generation
        place, nbytes, on_copied, is_hot = self._targets.pop(generation)
        self._busy.discard(order.key)
        refusal = result.refusal
        slot = self._index.table.find(order.key)
        alive = slot is not None and self._index.table.version[slot] == opened.version
        if refusal is not None and refusal.code in (DeadlineExceeded.code, PeerLost.code):
            # The node may still be writing there.
            self._space.free_put_at(now_s + self._rules.put_release_s, generation, [place], nbytes)
        elif refusal is not None:
            self._space.free([place], nbytes)
        elif slot is None or not alive or place[0] not in self._segments.by_number:
            self._space.free([place], nbytes)
            refusal = _GONE
        else:
            replicas = [*self._index.table.dram_replicas(slot), Replica(*place, generation)]
            self._index.set_dram(slot, replicas, hot=generation if is_hot else None)
            self._index.mark_readable(slot)
        if refusal is not None and refusal.code == Corrupt.code:
            source = order.source
            self.quarantine(order.key, source.generation, source.segment, source.offset, now_s)
        if on_copied is not None:
            on_copied(order.key, refusal, now_s)

    def quarantine(self, key: bytes, generation: int, segment: str, offset: int, now_s: float) -> bool:
        """Remove a corrupt replica. Return False if the object has no such replica, or it was moved.

        If the only other replica is on an SSD that is away, the object stays and is dormant.
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
            self.on_record_corrupt(key, generation)
            index.drop_ssd(slot, now_s)
        else:
            index.drop_replicas(slot, bad, now_s)
        return True


_GONE = Refusal(NotFound.code, "the object was removed or replaced meanwhile")
