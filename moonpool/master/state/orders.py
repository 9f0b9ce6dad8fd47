"""What nodes are asked to do, and what has become of it. Pure.

An order is sent, and sent again to a node that connects anew, until it is answered, its time is over or its node is
gone; then whoever gave it is told, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from moonpool.base.errors import DeadlineExceeded, PeerLost
from moonpool.store.messages import Order, OrderKind, OrderResult, Placement, Refusal

Done = Callable[["OpenOrder", OrderResult, float], None]


class OpenOrder:
    """`version` is the object's when the order was given."""

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
        self._fresh: dict[str, dict[int, Order]] = {}  # by node, not sent yet
        self.counters = dict.fromkeys(("orders_done", "orders_failed"), 0)

    def __len__(self) -> int:
        return len(self._open)

    def give(
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
        self._fresh.setdefault(node, {})[order.order_id] = order

    @property
    def has_news(self) -> bool:
        return bool(self._fresh)

    def nodes_with_news(self) -> list[str]:
        return list(self._fresh)

    def take(self, node: str) -> list[Order]:
        """Orders that the node was not sent yet."""
        return list(self._fresh.pop(node, {}).values())

    def take_all(self, node: str) -> list[Order]:
        """Every open order of a node, for one that connects anew."""
        self._fresh.pop(node, None)
        return [each.order for each in self._open.values() if each.node == node]

    def done(self, results: Sequence[OrderResult], now_s: float) -> None:
        """Unknown ones are ignored: they were given up."""
        for result in results:
            opened = self._open.pop(result.order_id, None)
            if opened is not None:
                self._finish(opened, result, now_s)

    def expire(self, now_s: float, limit: int) -> bool:
        """Gives up what took too long. True when there may be more."""
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

    def open(self) -> Iterator[OpenOrder]:
        return iter(self._open.values())

    def _fail(self, orders: Sequence[OpenOrder], refusal: Refusal, now_s: float) -> None:
        for each in orders:
            del self._open[each.order.order_id]
            self._unsend(each)
            self._finish(each, OrderResult(each.order.order_id, refusal), now_s)

    def _unsend(self, opened: OpenOrder) -> None:
        """Nobody carries out an order that was given up: its target may be somebody else's."""
        fresh = self._fresh.get(opened.node)
        if fresh is not None and fresh.pop(opened.order.order_id, None) is not None and not fresh:
            del self._fresh[opened.node]

    def _finish(self, opened: OpenOrder, result: OrderResult, now_s: float) -> None:
        self.counters["orders_done" if result.refusal is None else "orders_failed"] += 1
        opened.on_done(opened, result, now_s)
