"""Any order of events, crashes of the master at any moment among them: the state agrees with a model of what was
promised, with what really lies in the nodes, and with itself.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from state_model import FOREVER, G, OpenPut, Stored, claims_on
from state_nodes import NodeEvents
from state_world import KEYS, NODES, nodes, picks, rarely, some_keys

from moonpool.base.errors import InvalidInput, NoSpace, NotFound, NotSettled, StaleGeneration, Unavailable
from moonpool.master.state import snapshot
from moonpool.store import messages as m


class PoolMachine(NodeEvents):
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
        blocked = {put.key for put in self.open if put.renewed_s + self.pool_rules.put_discard_s > self.now_s}
        settled_up_to = self._let_go(holder) if holder and hard % 2 else 0
        self.num_starts += 1
        number = self.num_starts
        try:
            reply = self.state.put_start(
                keys,
                [nbytes] * len(keys),
                options,
                self.now_s,
                session=holder,
                groups=[group] * len(keys),
                parents=[*keys[1:], b""],
                settled_up_to=settled_up_to,
                number=number,
            )
        except StaleGeneration:
            self._begins_anew(session)
            return
        for at, key in enumerate(keys):
            refusal = reply.refusals.get(at)
            if refusal is not None:
                assert not reply.replicas[at]
                stored = key in self.stored and not replace
                expected = (NoSpace.code, Unavailable.code if self._is_recounting() else NoSpace.code)
                assert refusal.code in expected or stored or key in blocked or key in keys[:at], refusal
                continue
            where = reply.replicas[at]
            assert len(where) == replicas if every else len(where) >= 1
            assert len({each.segment for each in where}) == len(where)
            until_s = FOREVER if holder else self.now_s + self.pool_rules.put_release_s
            self._granted(reply.generations[at], where, nbytes, until_s, ("put", reply.generations[at], holder))
            generation = reply.generations[at]
            self.open.append(OpenPut(key, generation, where, nbytes, holder, options.hard_pin, self.now_s, number))

    def _is_recounting(self) -> bool:
        """Whether a node's word is waited for."""
        segments = self.state.table_of_segments.of_tier(m.Tier.DRAM)
        return any(each.recount_above is not None for each in segments)

    def _let_go(self, session: int) -> int:
        """Up to which generation the process has none of its puts in its hands."""
        mine = [put.generation for put in self.open if put.session == session]
        up_to = min(mine) - 1 if mine else self.last_generation
        for claim in self.claims:
            if claim.owner[0] == "put" and claim.owner[2] == session and claim.owner[1] <= up_to:  # type: ignore[operator]
                claim.until_s = min(claim.until_s, self.now_s + self.pool_rules.put_release_s)
        return up_to

    @rule(keys=some_keys, granules=st.integers(1, 3), replicas=st.integers(1, 2), replace=st.booleans())
    def put(self, keys: list[bytes], granules: int, replicas: int, replace: bool) -> None:
        """From start to end."""
        before = len(self.open)
        self.put_start(keys, granules, replicas, replace, 1, 0, b"", False)
        for put in self.open[before:]:
            self.open.remove(put)
            self._end(put, False)

    @rule(pick=picks)
    def answer_is_given_up(self, pick: int) -> None:
        """Its client has done nothing with what it was granted: it never learned of it."""
        numbers = sorted({put.number for put in self.open if put.number})
        if not numbers:
            return
        number = numbers[pick % len(numbers)]
        lost = [put for put in self.open if put.number == number]
        self.state.put_drop(number, [put.key for put in lost], self.now_s)
        for put in lost:
            self.open.remove(put)
            self._release(("put", put.generation))
            pending = self.state.puts.pending.get(put.key)
            assert pending is None or pending.generation != put.generation, "its key is free"
            assert put.generation not in self.state.space.of_puts, "its space is free"

    def _is_answered(self, put: OpenPut) -> None:
        for each in [each for each in self.open if each.number == put.number]:
            each.number = 0

    @rule(pick=picks, verb=st.sampled_from(["end", "end", "end", "end", "partly", "revoke", "leave", "renew"]))
    def finish(self, pick: int, verb: str) -> None:
        if not self.open:
            return
        put = self.open[pick % len(self.open)]
        self._is_answered(put)
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
                claim.until_s = self.now_s + self.pool_rules.put_release_s

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
        try:
            infos = self.state.lookup(keys, self.now_s, prefix=prefix, session=holder)
        except StaleGeneration:
            self._begins_anew(session)
            return
        except NotSettled:
            assert holder, "copies are read at once"
            assert self.state.members.uncounted, "a restarted master has not heard from all nodes"
            return
        for found in infos:
            if found is None:
                continue
            self._leased(found.key)
            until_s = self.now_s + self.pool_rules.lease_s
            self.claims += claims_on(
                found.replicas, found.nbytes, until_s, ("lease", found.key, self.stored[found.key].generation)
            )
            version, remembered_s = self.stored[found.key].generation, self.now_s + found.remember_s
            self.remembered += [(found.key, place, version, remembered_s) for place in found.replicas]
            places = [place for place in found.replicas if place.segment.endswith(".dram")]
            self.looked_up = [*self.looked_up[-20:], (found.key, places, version)]
            if holder:
                self.claims += claims_on(found.replicas, found.nbytes, FOREVER, self._pin_of(holder, found.key))

    def _pin_of(self, holder: int, key: bytes) -> tuple[object, ...]:
        self.num_pins += 1
        return "pin", holder, key, self.stored[key].generation, self.num_pins

    @rule(pick=picks)
    def renew(self, pick: int) -> None:
        """A reader reports reads of what it remembers, or has remembered: reports may come late."""
        if not self.looked_up:
            return
        key, places, version = self.looked_up[pick % len(self.looked_up)]
        if places:
            last = max(place.generation for place in places)
            renewed = self.state.renew_leases([key], [last], self.now_s, [len(places)])
            if renewed.is_there == [True]:
                self._leased(key)
                remembered_s = self.now_s + renewed.remember_s
                self.remembered += [(key, place, version, remembered_s) for place in places]

    @rule(keys=some_keys)
    def exist(self, keys: list[bytes]) -> None:
        for key, found in zip(keys, self.state.exist(keys, self.now_s), strict=True):
            if found:
                self._leased(key)

    def _leased(self, key: bytes) -> None:
        self.stored[key].lease_until_s = self.now_s + self.pool_rules.lease_s

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
        gone = self._next_session(pick)
        self.open = [put for put in self.open if put.session != gone or not told]
        if told:
            self.state.sessions_gone([gone], self.now_s)

    def _begins_anew(self, pick: int) -> None:
        """The master took a living process for gone: no registry knew it any more, and none of its memory was left."""
        gone = self.sessions[pick]
        held = [claim for claim in self.claims if claim.session == gone]
        mounted = {(each.name, each.incarnation) for each in self.state.table_of_segments.all()}
        assert not [claim for claim in held if (claim.segment, claim.incarnation) in mounted]
        self._next_session(pick)
        self.open = [put for put in self.open if put.session != gone]

    def _next_session(self, pick: int) -> int:
        """Another process in place of this one, which holds nothing any more."""
        gone, self.sessions[pick] = self.sessions[pick], self.next_session
        self.next_session += 1
        self.claims = [claim for claim in self.claims if claim.session != gone]
        return gone

    @rule(keys=some_keys, force=st.booleans())
    def remove(self, keys: list[bytes], force: bool) -> None:
        gone = self.state.remove(keys, force, self.now_s)
        for key, is_gone in zip(keys, gone, strict=True):
            if is_gone:
                stored = self.stored.pop(key, None)
                assert stored is None or force or not self._is_kept(key, stored)
            else:
                assert not force

    @rule(key=st.sampled_from(KEYS), pick=picks)
    def reader_finds_wrong_bytes(self, key: bytes, pick: int) -> None:
        found = self.state.lookup([key], self.now_s, lease=False)[0]
        if found is None:
            return
        bad = found.replicas[pick % len(found.replicas)]
        self.stored[key].maybe_bad.add((bad.segment, bad.generation))
        assert self.state.report_corrupt(key, bad.generation, bad.segment, bad.offset, self.now_s)
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
                self.state.cancel_task(self.state.drain(f"{one}.dram", self.now_s), self.now_s)
        except (NotFound, InvalidInput, NoSpace):
            pass


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "STEP_SLOTS", 3)


SHORT = settings(
    max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
LONG = settings(SHORT, max_examples=3000, stateful_step_count=120, derandomize=False)


def test_any_order_of_events() -> None:
    run_state_machine_as_test(PoolMachine, settings=SHORT)


def test_a_record_made_of_a_bad_replica_keeps_nothing_before_it_is_told() -> None:
    machine = PoolMachine()
    machine.begin("lru")
    machine.node_leaves("b", True)
    machine.put([b"k0"], 1, 2, False)
    machine.node_works("a", 0, "done")
    (found,) = machine.state.lookup([b"k0"], machine.now_s, lease=False)
    assert found is not None
    machine.nothing_vanishes_without_reason()
    machine.reader_finds_wrong_bytes(b"k0", [each.segment for each in found.replicas].index("a.dram"))
    machine.node_leaves("c", True)
    machine.nothing_vanishes_without_reason()
    assert b"k0" not in machine.stored
    machine.teardown()


def test_a_process_that_outlives_every_node_begins_anew() -> None:
    machine = PoolMachine()
    machine.begin("lru")
    (first, _) = machine.sessions
    machine.put_start([b"k0"], 1, 1, False, 1, 0, b"", False)
    for name in NODES:
        machine.node_leaves(name, True)
    machine.time_passes(1.0, False)
    machine.node_starts("a")
    machine.put_start([b"k1"], 1, 1, False, 1, 0, b"", False)
    assert first not in machine.sessions
    machine.put_start([b"k1"], 1, 1, False, 1, 0, b"", False)
    assert [put.key for put in machine.open] == [b"k1"]
    machine.agrees_with_itself()
    machine.teardown()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_any_order_of_many_events() -> None:
    run_state_machine_as_test(PoolMachine, settings=LONG)
