"""Nodes in the world of the state machine: they come and go, beat, carry orders out well, badly or never."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule
from state_model import FakeNode, G
from state_pool import descriptor
from state_world import NODES, World, nodes, picks, rarely

from moonpool.base.errors import Corrupt, NoSpace, StaleGeneration
from moonpool.store import messages as m

DRAM_GRANULES, SSD_GRANULES = 9, 12


class NodeEvents(World):
    # time and nodes

    @rule(seconds=st.floats(0.01, 9), beats=st.booleans())
    def time_passes(self, seconds: float, beats: bool) -> None:
        self.now_s += seconds
        if beats:
            for name in NODES:
                self.node_beats(name, True)
        self.state.tick(self.now_s)

    @rule(name=nodes)
    def node_starts(self, name: str) -> None:
        node = self.nodes[name]
        if node.alive:
            return
        node.alive = True
        self._mount(node, ssd_first=len(self.open) % 2 == 0)

    def _mount(self, node: FakeNode, ssd_first: bool) -> None:
        for tier in (m.Tier.SSD, m.Tier.DRAM) if ssd_first else (m.Tier.DRAM, m.Tier.SSD):
            if tier is m.Tier.DRAM:
                self._mount_dram(node)
            elif node.has_ssd:
                self._mount_ssd(node)

    def _mount_dram(self, node: FakeNode) -> None:
        self.incarnation += 1
        self.state.members.disconnected(f"{node.name}.dram", node.dram, self.now_s)
        self._disconnect(f"{node.name}.dram")
        where = descriptor(f"{node.name}.dram", DRAM_GRANULES, self.incarnation)
        reply = self.state.mount(node.name, where, self.now_s)
        assert reply.generation_floor >= self.last_generation
        node.dram = self.incarnation
        node.memory.clear()
        node.stamps = {offset * G: reply.generation_floor for offset in range(DRAM_GRANULES)}
        assert self.state.heartbeat(f"{node.name}.dram", node.dram, self.now_s).known

    def _mount_ssd(self, node: FakeNode) -> None:
        self.incarnation += 1
        self._disconnect(f"{node.name}.ssd")
        where = descriptor(f"{node.name}.ssd", 2**20, self.incarnation)
        self.state.mount(node.name, where, self.now_s, tier=m.Tier.SSD, capacity_nbytes=SSD_GRANULES * G)
        node.ssd = self.incarnation
        self._inventory(node)

    def _disconnect(self, name: str) -> None:
        """The earlier process is gone for the master too, so that the name is free."""
        known = self.state.table_of_segments.get(name)
        if known is not None:
            self.state.members.disconnected(name, known.incarnation, self.now_s)

    def _inventory(self, node: FakeNode, whole: bool = True) -> None:
        """Nothing is carried out meanwhile."""
        items = node.items()
        half = len(items) // 2
        for part, last in ((items[:half], False), (items[half:], True)):
            if last and not whole:
                return
            answers = self.state.members.inventory(f"{node.name}.ssd", node.ssd, part, last, self.now_s)
            self.unreported -= {(node.name, item.key, item.generation) for item in part}
            for item, wanted in zip(part, answers, strict=True):
                if not wanted:
                    del node.log[item.key, item.generation]
        node.inbox = self.state.orders.open_orders(node.name)
        node.answers.clear()

    @rule(name=nodes, whole=st.booleans())
    def node_beats(self, name: str, whole: bool) -> None:
        node = self.nodes[name]
        if not node.alive:
            return
        replies = {}
        if node.dram:
            replies["dram"] = self.state.heartbeat(f"{name}.dram", node.dram, self.now_s)
            if not replies["dram"].known:
                self._mount_dram(node)
            elif replies["dram"].recount_above is not None:
                self._recount(node, replies["dram"].recount_above)
        if node.ssd:
            replies["ssd"] = self.state.heartbeat(f"{name}.ssd", node.ssd, self.now_s)
            if not replies["ssd"].known:
                self._mount_ssd(node)
            elif replies["ssd"].recount_above is not None:
                self._inventory(node, whole)

    def _recount(self, node: FakeNode, above: int) -> None:
        """Orders of the earlier master are forgotten, or done, by then."""
        node.inbox.clear()
        node.answers.clear()
        spans = node.spans_above(above)
        self.state.members.recount(f"{node.name}.dram", node.dram, spans, self.sessions, self.now_s)
        node.inbox = self.state.orders.open_orders(node.name)

    @rule(name=nodes, happens=rarely)
    def node_dies(self, name: str, happens: bool) -> None:
        if happens:
            self.nodes[name].die()

    @rule(name=nodes, happens=rarely)
    def node_leaves(self, name: str, happens: bool) -> None:
        if not happens:
            return
        node = self.nodes[name]
        if node.dram:
            self.state.unmount(f"{name}.dram", node.dram, self.now_s)
        if node.ssd:
            self.state.unmount(f"{name}.ssd", node.ssd, self.now_s)
        node.die()

    # orders

    @rule(name=nodes, pick=picks, fate=st.sampled_from(["done", "done", "done", "failed", "corrupt"]))
    def node_works(self, name: str, pick: int, fate: str) -> None:
        node = self.nodes[name]
        if not node.alive:
            return
        fresh = self.state.orders.take_unsent(name)
        for order in fresh:
            self._check_order(order)
        node.inbox += fresh
        if node.inbox:
            order = node.inbox.pop(pick % len(node.inbox))
            node.answers.append(self._carry_out(node, order, fate))

    def _check_order(self, order: m.Order) -> None:
        if order.kind is m.OrderKind.COPY:
            assert order.target is not None
            self._granted(order.target.generation, (order.target,), order.nbytes, 0.0, ("copy", order.order_id))

    def _carry_out(self, node: FakeNode, order: m.Order, fate: str) -> m.OrderResult:
        if order.kind is m.OrderKind.DROP:
            node.log.pop((order.key, order.source.generation), None)
            return m.OrderResult(order.order_id)
        if order.kind is m.OrderKind.VOID:
            node.void(order.key, order.source)
            return m.OrderResult(order.order_id)
        source = self.nodes[order.source.segment.split(".")[0]]
        if not source.alive or not source.holds(order.key, order.source):
            return _refused(order, StaleGeneration.code)
        if fate == "failed":
            return _refused(order, NoSpace.code)
        if fate == "corrupt":
            if order.key in self.stored:
                self.stored[order.key].maybe_bad.add((order.source.segment, order.source.generation))
            return _refused(order, Corrupt.code)
        if order.kind is m.OrderKind.OFFLOAD:
            offset = node.append(order.key, order.source.generation, order.nbytes)
            self.unreported.add((node.name, order.key, order.source.generation))
            self.of_order[order.order_id] = (node.name, order.key, order.source.generation)
            return m.OrderResult(order.order_id, None, offset)
        assert order.target is not None
        node.write(order.target, order.nbytes, order.key)
        return m.OrderResult(order.order_id)

    @rule()
    def all_nodes_work(self) -> None:
        """As they should."""
        for name in NODES:
            for _ in range(8):
                self.node_works(name, 0, "done")
            self.node_answers(name)

    @rule(name=nodes)
    def node_answers(self, name: str) -> None:
        node = self.nodes[name]
        answers, node.answers = node.answers, []
        self.unreported -= {self.of_order[each.order_id] for each in answers if each.order_id in self.of_order}
        self.state.orders_done(answers, self.now_s)

    @rule(name=nodes)
    def node_reconnects(self, name: str) -> None:
        """Answers got lost; what is still open is sent again, and may be carried out twice."""
        node = self.nodes[name]
        if node.alive:
            node.answers.clear()
            known = {order.order_id for order in node.inbox}
            node.inbox = self.state.orders.open_orders(name)
            for order in node.inbox:
                if order.order_id not in known:
                    self.last_generation = max(
                        self.last_generation, 0 if order.target is None else order.target.generation
                    )

    @rule(name=nodes)
    def node_compacts(self, name: str) -> None:
        node = self.nodes[name]
        segment = self.state.table_of_segments.find(f"{name}.ssd", node.ssd) if node.ssd else None
        if segment is None or segment.is_away or node.answers or not node.log:
            return
        key, generation = next(iter(node.log))
        nbytes, _ = node.log.pop((key, generation))
        offset = node.append(key, generation, nbytes)
        item = (key, generation, offset)
        if not self.state.members.relocated(f"{name}.ssd", node.ssd, [item])[0]:
            del node.log[key, generation]


def _refused(order: m.Order, code: str) -> m.OrderResult:
    return m.OrderResult(order.order_id, m.Refusal(code, "said the test"))
