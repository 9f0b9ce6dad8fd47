"""Any order of events, crashes of the master at any moment among them: the state agrees with a model of what was
promised, with what really lies in the nodes, and with itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from state_model import FOREVER, Claim, FakeNode, G, claims_on
from state_pool import descriptor

from moonpool.base.errors import Corrupt, InvalidInput, NoSpace, NotFound, StaleGeneration
from moonpool.store import messages as m
from moonpool.store.rules import PoolRules
from moonpool.store.state import PoolState, snapshot
from moonpool.store.state.fates import Fate
from moonpool.store.state.table import Flag

KEYS = [b"k%d" % number for number in range(14)]
NODES = {"a": True, "b": True, "c": False}  # name -> has an SSD
RULES: dict[str, Any] = {
    "lease_s": 5.0,
    "high_watermark": 0.8,
    "low_watermark": 0.5,
    "put_discard_s": 8.0,
    "put_release_s": 20.0,
    "segment_ttl_s": 25.0,
    "away_ttl_s": 400.0,
    "max_objects": 64,
    "step_objects": 3,
    "hot_hits": 3,
    "hot_max_part": 0.4,
    "order_timeout_s": 30.0,
    "offloads_in_flight": 3,
    "ssd_high_watermark": 0.8,
    "task_moves_in_flight": 2,
}
DRAM_GRANULES, SSD_GRANULES = 9, 12
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)
nodes = st.sampled_from(sorted(NODES))
picks = st.integers(0, 30)
rarely = st.integers(0, 3).map(lambda number: number == 3)
EVICTED = (Fate.EVICTED_FOR_PUT, Fate.EVICTED_WATERMARK, Fate.SSD_EVICTED)


@dataclass
class OpenPut:
    key: bytes
    generation: int
    replicas: tuple[m.Placement, ...]
    nbytes: int
    session: int
    hard: bool
    renewed_s: float


@dataclass
class Stored:
    """An acknowledged object."""

    generation: int
    hard: bool
    lease_until_s: float = 0.0
    replicas: tuple[m.Placement, ...] = ()
    generations: set[int] = field(default_factory=set)
    maybe_bad: set[tuple[str, int]] = field(default_factory=set)


class PoolMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["lru", "s3fifo", "prefix"]))
    def begin(self, policy: str) -> None:
        self.rules = PoolRules(**RULES, eviction=policy)
        self.now_s, self.epoch, self.last_generation = 0.0, 1, 0
        self.state = PoolState(self.rules, 1, journalled=True)
        self.state.restore(iter(()), 0.0)
        self.nodes = {name: FakeNode(name, has_ssd) for name, has_ssd in NODES.items()}
        self.incarnation = 0
        self.open: list[OpenPut] = []
        self.stored: dict[bytes, Stored] = {}
        self.claims: list[Claim] = []
        self.sessions = [2**32 + 1, 2**32 + 2]
        self.next_session = 2**32 + 3
        self.num_pins = 0
        self.of_order: dict[int, tuple[str, bytes, int]] = {}
        self.unreported: set[tuple[str, bytes, int]] = set()  # (node, key, generation) of records
        self.journal: list[bytes] = []
        self.next_journal: list[bytes] = []  # since the snapshot that is being written
        self.snapshot: Iterator[list[bytes]] | None = None
        self.parts: list[bytes] = []
        self.listener: dict[bytes, m.Tier] = {}
        for name in NODES:
            self.node_starts(name)

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
        node.inbox = self.state.orders.take_all(node.name)
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
        fresh = self.state.orders.take(name)
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
            node.inbox = self.state.orders.take_all(name)
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

    # clients

    @rule(
        keys=some_keys,
        granules=st.integers(1, 4),
        replicas=st.integers(1, 3),
        replace=st.booleans(),
        hard=st.integers(0, 7),
        session=st.integers(0, 2),
        group=st.sampled_from([b"", b"", b"g"]),
        every=st.booleans(),
    )
    def put_start(
        self,
        keys: list[bytes],
        granules: int,
        replicas: int,
        replace: bool,
        hard: int,
        session: int,
        group: bytes,
        every: bool,
    ) -> None:
        options = m.PutOptions(
            num_replicas=replicas, replace=replace, hard_pin=hard == 0 and granules == 1, all_replicas=every
        )
        holder = self.sessions[session] if session < len(self.sessions) else 0
        nbytes = granules * G - 5
        blocked = {put.key for put in self.open if put.renewed_s + self.rules.put_discard_s > self.now_s}
        settled_up_to = self._let_go(holder) if holder and hard % 2 else 0
        reply = self.state.put_start(
            keys,
            [nbytes] * len(keys),
            options,
            self.now_s,
            session=holder,
            groups=[group] * len(keys),
            parents=[*keys[1:], b""],
            settled_up_to=settled_up_to,
        )
        for at, key in enumerate(keys):
            refusal = reply.refusals.get(at)
            if refusal is not None:
                assert not reply.replicas[at]
                stored = key in self.stored and not replace
                assert refusal.code == NoSpace.code or stored or key in blocked or key in keys[:at], refusal
                continue
            where = reply.replicas[at]
            assert len(where) == replicas if every else len(where) >= 1
            assert len({each.segment for each in where}) == len(where)
            until_s = FOREVER if holder else self.now_s + self.rules.put_release_s
            self._granted(reply.generations[at], where, nbytes, until_s, ("put", reply.generations[at], holder))
            self.open.append(OpenPut(key, reply.generations[at], where, nbytes, holder, options.hard_pin, self.now_s))

    def _let_go(self, session: int) -> int:
        """Up to which generation the process has none of its puts in its hands."""
        mine = [put.generation for put in self.open if put.session == session]
        up_to = min(mine) - 1 if mine else self.last_generation
        for claim in self.claims:
            if claim.owner[0] == "put" and claim.owner[2] == session and claim.owner[1] <= up_to:  # type: ignore[operator]
                claim.until_s = min(claim.until_s, self.now_s + self.rules.put_release_s)
        return up_to

    @rule(keys=some_keys, granules=st.integers(1, 3), replicas=st.integers(1, 2), replace=st.booleans())
    def put(self, keys: list[bytes], granules: int, replicas: int, replace: bool) -> None:
        """From start to end."""
        before = len(self.open)
        self.put_start(keys, granules, replicas, replace, 1, 0, b"", False)
        for put in self.open[before:]:
            self.open.remove(put)
            self._end(put, False)

    def _granted(
        self, generation: int, where: tuple[m.Placement, ...], nbytes: int, until_s: float, owner: tuple[object, ...]
    ) -> None:
        assert generation > self.last_generation or owner[0] == "copy", "generations rise"
        self.last_generation = max(self.last_generation, generation)
        self.claims = [claim for claim in self.claims if claim.until_s > self.now_s]
        for new in claims_on(where, nbytes, until_s, owner):
            taken = [claim for claim in self.claims if claim.overlaps(new)]
            assert not taken, f"space was granted again before its time: {taken}"
            self.claims.append(new)

    def _release(self, owner: tuple[object, ...]) -> None:
        self.claims = [claim for claim in self.claims if claim.owner[: len(owner)] != owner]

    @rule(pick=picks, verb=st.sampled_from(["end", "end", "end", "end", "partly", "revoke", "leave", "renew"]))
    def finish(self, pick: int, verb: str) -> None:
        if not self.open:
            return
        put = self.open[pick % len(self.open)]
        if verb == "renew":
            if self.state.put_renew([put.key], [put.generation], self.now_s) == [True]:
                put.renewed_s = self.now_s
                self._renew_claims(put)
            return
        self.open.remove(put)
        if verb in ("end", "partly"):
            self._end(put, verb == "partly")
        elif verb == "revoke":
            self.state.put_revoke([put.key], [put.generation], True, self.now_s)
            self._release(("put", put.generation))
        else:
            self.state.put_revoke([put.key], [put.generation], False, self.now_s)

    def _renew_claims(self, put: OpenPut) -> None:
        for claim in self.claims:
            if claim.owner[:2] == ("put", put.generation) and not put.session:
                claim.until_s = self.now_s + self.rules.put_release_s

    def _end(self, put: OpenPut, partly: bool) -> None:
        failed = (put.replicas[0].segment,) if partly else ()
        for place in put.replicas:
            if place.segment not in failed:
                self.nodes[place.segment.split(".")[0]].write(place, put.nbytes, put.key)
        self._release(("put", put.generation))
        refusals = self.state.put_end([put.key], [put.generation], {0: failed} if failed else {}, self.now_s)
        if refusals:
            assert refusals[0].code == StaleGeneration.code
        else:
            self.stored[put.key] = Stored(put.generation, put.hard)
        again = self.state.put_end([put.key], [put.generation], {}, self.now_s)
        assert again.keys() == refusals.keys(), "said twice"

    @rule(keys=some_keys, session=st.integers(0, 4), prefix=st.booleans())
    def lookup(self, keys: list[bytes], session: int, prefix: bool) -> None:
        holder = self.sessions[session] if session < len(self.sessions) else 0
        for found in self.state.lookup(keys, self.now_s, prefix=prefix, session=holder):
            if found is None:
                continue
            self._leased(found.key)
            until_s = self.now_s + self.rules.lease_s
            self.claims += claims_on(
                found.replicas, found.nbytes, until_s, ("lease", found.key, self.stored[found.key].generation)
            )
            if holder:
                self.claims += claims_on(found.replicas, found.nbytes, FOREVER, self._pin_of(holder, found.key))

    def _pin_of(self, holder: int, key: bytes) -> tuple[object, ...]:
        self.num_pins += 1
        return "pin", holder, key, self.stored[key].generation, self.num_pins

    @rule(keys=some_keys)
    def exist(self, keys: list[bytes]) -> None:
        for key, found in zip(keys, self.state.exist(keys, self.now_s), strict=True):
            if found:
                self._leased(key)

    def _leased(self, key: bytes) -> None:
        self.stored[key].lease_until_s = self.now_s + self.rules.lease_s

    @rule(key=st.sampled_from(KEYS), connection=st.integers(1, 2), closes=st.booleans())
    def pin_by_connection(self, key: bytes, connection: int, closes: bool) -> None:
        found = self.state.lookup([key], self.now_s, lease=False)[0]
        assert self.state.pin(connection, [key], self.now_s) == [found is not None]
        if closes:
            self.state.connection_closed(connection, self.now_s)
            self._release(("pin", connection))
        elif found is not None:
            self.claims += claims_on(found.replicas, found.nbytes, FOREVER, self._pin_of(connection, key))

    @rule(key=st.sampled_from(KEYS), pick=picks)
    def unpin(self, key: bytes, pick: int) -> None:
        holder = [*self.sessions, 1, 2][pick % 4]
        self.state.unpin(holder, [key], self.now_s)
        pins = sorted({claim.owner for claim in self.claims if claim.owner[:3] == ("pin", holder, key)})
        if pins:
            self._release(pins[0])

    @rule(pick=st.integers(0, 1), told=st.booleans(), happens=rarely)
    def session_ends(self, pick: int, told: bool, happens: bool) -> None:
        if not happens:
            return
        gone = self.sessions[pick]
        self.sessions[pick] = self.next_session
        self.next_session += 1
        self.claims = [claim for claim in self.claims if gone not in claim.owner]
        self.open = [put for put in self.open if put.session != gone or not told]
        if told:
            self.state.sessions_gone([gone], self.now_s)

    @rule(keys=some_keys, force=st.booleans())
    def remove(self, keys: list[bytes], force: bool) -> None:
        gone = self.state.remove(keys, force, self.now_s)
        for key, is_gone in zip(keys, gone, strict=True):
            if is_gone:
                stored = self.stored.pop(key, None)
                assert stored is None or force or not self._is_kept(key, stored)
            else:
                assert not force

    def _is_kept(self, key: bytes, stored: Stored) -> bool:
        pinned = any(claim.owner[0] == "pin" and claim.owner[2:4] == (key, stored.generation) for claim in self.claims)
        return stored.hard or stored.lease_until_s > self.now_s or pinned

    @rule(key=st.sampled_from(KEYS), pick=picks)
    def reader_finds_wrong_bytes(self, key: bytes, pick: int) -> None:
        found = self.state.lookup([key], self.now_s, lease=False)[0]
        if found is None:
            return
        bad = found.replicas[pick % len(found.replicas)]
        self.stored[key].maybe_bad.add((bad.segment, bad.generation))
        assert self.state.report_corrupt(key, bad.generation, bad.segment, self.now_s)
        left = self.state.lookup([key], self.now_s, lease=False)[0]
        assert left is None or bad not in left.replicas
        assert len(found.replicas) == 1 or left is not None

    @rule(key=st.sampled_from(KEYS), one=nodes, other=nodes, verb=st.sampled_from(["copy", "move", "drain", "cancel"]))
    def task(self, key: bytes, one: str, other: str, verb: str) -> None:
        try:
            if verb == "copy":
                self.state.copy(key, [f"{one}.dram"], self.now_s)
            elif verb == "move":
                self.state.move(key, f"{one}.dram", f"{other}.dram", self.now_s)
            elif verb == "drain":
                self.state.drain(f"{one}.dram", self.now_s)
            else:
                self.state.cancel_task(self.state.drain(f"{one}.dram", self.now_s))
        except (NotFound, InvalidInput, NoSpace):
            pass

    # the master's death

    @rule()
    def snapshot_goes_on(self) -> None:
        self._take_records()
        if self.snapshot is None:
            self.snapshot = self.state.snapshot_records(self.now_s)
            self.parts, self.next_journal = next(self.snapshot), []
            return
        try:
            self.parts += next(self.snapshot)
        except StopIteration:
            self.journal = self.parts + self.next_journal
            self.snapshot = None

    def _take_records(self) -> None:
        records = self.state.take_records()
        self.journal += records
        self.next_journal += records

    @rule(happens=rarely)
    def master_crashes(self, happens: bool) -> None:
        if happens:
            self._crash()

    def _crash(self) -> None:
        self._take_records()
        before, held = _picture(self.state), _held(self.state)
        self.epoch += 1
        self.snapshot = None
        self.state = PoolState(self.rules, self.epoch, journalled=True)
        self.state.restore(iter(self.journal), self.now_s)
        assert _picture(self.state) == before
        assert held.items() <= _held(self.state).items(), "those that a process let go are held until it says so again"
        self.state.check_integrity()
        self.listener = {key: tier for part in self.state.snapshot() for key, tier in part}
        self.state.take_changes()
        places = set()
        for key, stored in self.stored.items():
            found = self.state.lookup([key], self.now_s, lease=False)[0]
            if found is not None:
                stored.lease_until_s = self.now_s + self.rules.lease_s
                places.update((each.segment, each.incarnation, each.offset) for each in found.replicas)
        # Connections ended with the master, and nobody knows of leases on what had been given up.
        self.claims = [
            claim
            for claim in self.claims
            if claim.owner[0] == "put"
            or (claim.owner[0] == "pin" and claim.owner[1] not in (1, 2))
            or (claim.owner[0] == "lease" and (claim.segment, claim.incarnation, claim.start) in places)
        ]
        for put in self.open:
            put.renewed_s = self.now_s

    # what must be so after each step

    @invariant()
    def agrees_with_itself(self) -> None:
        self.state.check_integrity()
        self._take_records()

    @invariant()
    def nothing_vanishes_without_reason(self) -> None:
        table = self.state.index.table
        for key, stored in list(self.stored.items()):
            found = self.state.lookup([key], self.now_s, lease=False)[0]
            slot = table.find(key)
            if slot is not None:
                assert table.version[slot] == stored.generation, "it is the value that was acknowledged"
            if found is not None:
                self._is_really_there(key, found)
                stored.replicas = found.replicas
                stored.generations.update(each.generation for each in found.replicas)
                continue
            living = [each for each in stored.replicas if self._lives(each)]
            bad = all((each.segment, each.generation) in stored.maybe_bad for each in living)
            if slot is None:
                fate = next(fate for known, fate, _ in self.state.index.fates.items() if known == key)
                assert fate in EVICTED or bad, f"{key!r} was on {living} and is gone: {fate.name}"
                assert fate not in EVICTED or not self._is_kept(key, stored), "evicted though it was kept"
                assert fate in (*EVICTED, Fate.CORRUPT) or not self._is_unreported(key, stored), (
                    f"{key!r} is on an SSD: {fate.name}"
                )
                del self.stored[key]
            else:
                assert table.flags[slot] & Flag.DORMANT
                assert bad or not self._is_kept(key, stored), "its memory was evicted though it was kept"

    def _is_unreported(self, key: bytes, stored: Stored) -> bool:
        """A node has written it to its log, and the master has not heard of it yet."""
        records = {(node.name, *record) for node in self.nodes.values() for record in node.log if record[0] == key}
        return any(record in self.unreported and record[2] in stored.generations for record in records)

    @invariant()
    def nothing_comes_back(self) -> None:
        known = {key for part in self.state.snapshot() for key, _ in part}
        assert known <= set(self.stored)

    def _lives(self, place: m.Placement) -> bool:
        segment = self.state.table_of_segments.find(place.segment, place.incarnation)
        return segment is not None and not segment.is_away

    def _is_really_there(self, key: bytes, found: m.ObjectInfo) -> None:
        for place in found.replicas:
            node = self.nodes[place.segment.split(".")[0]]
            mounted = node.ssd if place.segment.endswith(".ssd") else node.dram
            if node.alive and mounted == place.incarnation:
                assert node.holds(key, place), f"{key!r} is said to be at {place}"

    @invariant()
    def listeners_know_what_is_stored(self) -> None:
        changes = self.state.take_changes()
        if changes is not None:
            for key in changes.removed:
                self.listener.pop(key, None)
            self.listener.update(dict.fromkeys(changes.stored, m.Tier.DRAM))
            self.listener.update(changes.tiers)
        if not self.state.index.losses.pending:
            assert self.listener == {key: tier for part in self.state.snapshot() for key, tier in part}

    def teardown(self) -> None:
        """When all promises are over and everything is removed, all space is free."""
        if not hasattr(self, "state"):
            return
        self.state.sessions_gone(range(2**32, self.next_session), self.now_s)
        for connection in (1, 2):
            self.state.connection_closed(connection, self.now_s)
        for _ in range(4):
            for name in NODES:
                self.node_starts(name)
                self.node_beats(name, True)
            self.state.remove(KEYS, True, self.now_s)
            self.now_s += self.rules.segment_ttl_s - 1
            while self.state.tick(self.now_s):
                pass
        self.state.check_integrity()
        assert self.state.stats().used_nbytes == 0
        assert self.state.stats().num_objects == 0
        assert len(self.state.index.table) == 0


def _refused(order: m.Order, code: str) -> m.OrderResult:
    return m.OrderResult(order.order_id, m.Refusal(code, "said the test"))


def _picture(state: PoolState) -> dict[str, Any]:
    """What must survive the master."""
    table, pins = state.index.table, state.index.pins
    objects = {
        table.keys[slot]: (
            table.version[slot],
            table.nbytes[slot],
            table.dram_replicas(slot),
            table.ssd_replica(slot),
            table.flags[slot] & Flag.HARD_PIN,
            table.group_of.get(slot),
            table.identity[slot],
        )
        for slot in table.slots()
    }
    held = [
        (each.key, each.slot is None, sorted(holder for holder in holders if holder >= 2**32))
        for each, holders in pins.all()
    ]
    segments = {
        number: (each.name, each.incarnation, each.is_away, each.draining, each.floor)
        for number, each in state.table_of_segments.by_number.items()
    }
    return {
        "objects": objects,
        "puts": {put.key: (put.generation, put.places, put.group) for put in state.puts.pending.values()},
        "pins": sorted(each for each in held if each[2]),
        "segments": segments,
    }


def _held(state: PoolState) -> dict[int, object]:
    """Space of ended puts that processes may be writing to."""
    return {generation: kept for generation, kept in state.space.of_puts.items() if kept[2]}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "STEP_SLOTS", 3)


SHORT = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
LONG = settings(SHORT, max_examples=3000, stateful_step_count=120, derandomize=False)


def test_any_order_of_events() -> None:
    run_state_machine_as_test(PoolMachine, settings=SHORT)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_any_order_of_many_events() -> None:
    run_state_machine_as_test(PoolMachine, settings=LONG)
