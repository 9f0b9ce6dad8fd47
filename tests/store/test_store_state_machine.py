"""Any order of events: the state agrees with a small model of what was promised, and with itself."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonpool.store.allocator import GRANULE_NBYTES
from moonpool.store.messages import Placement, PutGrant, PutItem, Written
from moonpool.store.rules import PoolRules
from moonpool.store.state import PoolState
from moonpool.transfer.descriptor import SegmentDescriptor

G = GRANULE_NBYTES
RULES = PoolRules(
    lease_s=5,
    high_watermark=0.8,
    low_watermark=0.5,
    put_discard_s=8,
    put_release_s=20,
    segment_ttl_s=30,
    step_objects=3,
)
KEYS = st.sampled_from([b"k%d" % number for number in range(12)])
SEGMENTS = st.sampled_from(["a", "b", "c"])
Span = tuple[str, int, int, int]  # segment, incarnation, start, end


def spans_of(placements: tuple[Placement, ...], nbytes: int) -> list[Span]:
    rounded = -(-nbytes // G) * G
    return [(each.segment, each.incarnation, each.offset, each.offset + rounded) for each in placements]


def overlap(one: Span, other: Span) -> bool:
    return one[:2] == other[:2] and one[2] < other[3] and other[2] < one[3]


class PoolMachine(RuleBasedStateMachine):
    """`promised` are spans that must not be granted again before a moment (leases, slow writers); `pinned` are
    spans that must not be granted again while their pin is held.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.state = PoolState(RULES, epoch=3)
        self.incarnations: dict[str, int] = {}
        self.open: list[PutGrant] = []
        self.last_generation = 0
        self.listener: set[bytes] = set()
        self.promised: list[tuple[Span, float]] = []
        self.pinned: dict[tuple[int, bytes], list[list[Span]]] = {}

    @rule(seconds=st.floats(0.1, 9))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.state.tick(self.now_s)

    @rule(name=SEGMENTS, granules=st.integers(1, 12))
    def mount(self, name: str, granules: int) -> None:
        incarnation = self.incarnations[name] = self.incarnations.get(name, 0) + 1
        descriptor = SegmentDescriptor(
            name=name, nbytes=granules * G, incarnation=incarnation, host="h", endpoints=(), granule_nbytes=G
        )
        reply = self.state.mount(f"node-{name}", descriptor, self.now_s)
        assert reply.generation_floor >= self.last_generation
        assert self.state.heartbeat(name, incarnation, self.now_s)

    @rule(name=SEGMENTS)
    def heartbeat(self, name: str) -> None:
        self.state.heartbeat(name, self.incarnations.get(name, 0), self.now_s)

    @rule(name=SEGMENTS)
    def unmount(self, name: str) -> None:
        self.state.unmount(name, self.incarnations.get(name, 0))

    @rule(keys=st.lists(KEYS, max_size=3), granules=st.integers(1, 4), replicas=st.integers(1, 3), hard=st.booleans())
    def put_start(self, keys: list[bytes], granules: int, replicas: int, hard: bool) -> None:
        items = [PutItem(key, granules * G - 7, replicas, pinned=hard and granules == 1) for key in keys]
        for outcome in self.state.put_start(items, self.now_s):
            if outcome.grant is not None:
                self._check_grant(outcome.grant, granules * G)
                self.open.append(outcome.grant)

    def _check_grant(self, grant: PutGrant, nbytes: int) -> None:
        assert grant.generation > self.last_generation
        self.last_generation = grant.generation
        assert len({each.segment for each in grant.replicas}) == len(grant.replicas) >= 1
        kept = [span for span, until_s in self.promised if until_s > self.now_s]
        kept += [span for held in self.pinned.values() for spans in held for span in spans]
        for new in spans_of(grant.replicas, nbytes):
            assert not any(overlap(new, old) for old in kept), "space was reused before its time"
            self.promised.append((new, self.now_s + RULES.put_release_s))

    def _written(self, grant: PutGrant) -> None:
        """The writer is done: its space is no longer kept for its sake."""
        places = {(each.segment, each.incarnation, each.offset) for each in grant.replicas}
        kept_until_s = self.now_s + RULES.lease_s
        self.promised = [
            (span, until_s) for span, until_s in self.promised if span[:3] not in places or until_s <= kept_until_s
        ]

    @rule(index=st.integers(0, 9), verb=st.sampled_from(["end", "end", "end", "revoke", "unsettled"]))
    def finish(self, index: int, verb: str) -> None:
        if not self.open:
            return
        grant = self.open.pop(index % len(self.open))
        written = Written(grant.key, grant.generation)
        if verb == "end":
            refusal = self.state.put_end([written], self.now_s)[0]
            assert refusal is None or refusal.code == "stale_generation"
            if refusal is None:
                self._written(grant)
                found = self.state.lookup([grant.key], False, self.now_s)[0]
                assert found is not None
                assert found.generation == grant.generation
        else:
            pending = "being written" in self.state.why(grant.key, self.now_s)
            self.state.put_revoke([written], verb == "revoke", self.now_s)
            if pending and verb == "revoke":
                self._written(grant)

    @rule(keys=st.lists(KEYS, max_size=4), prefix=st.booleans())
    def lookup(self, keys: list[bytes], prefix: bool) -> None:
        for found in self.state.lookup(keys, prefix, self.now_s):
            if found is not None:
                spans = spans_of(found.replicas, found.nbytes)
                self.promised += [(span, self.now_s + RULES.lease_s) for span in spans]

    @rule(keys=st.lists(KEYS, max_size=3), force=st.booleans())
    def remove(self, keys: list[bytes], force: bool) -> None:
        gone = self.state.remove(keys, force, self.now_s)
        present = self.state.exist(keys, self.now_s)
        assert [not each for each in gone] == present

    @rule(key=KEYS, connection=st.integers(1, 2))
    def pin(self, key: bytes, connection: int) -> None:
        found = self.state.lookup([key], False, self.now_s)[0]
        assert self.state.pin(connection, [key], self.now_s) == [found is not None]
        if found is not None:
            self.pinned.setdefault((connection, key), []).append(spans_of(found.replicas, found.nbytes))

    @rule(key=KEYS, connection=st.integers(1, 2))
    def unpin(self, key: bytes, connection: int) -> None:
        self.state.unpin(connection, [key], self.now_s)
        if self.pinned.get((connection, key)):
            self.pinned[connection, key].pop(0)

    @rule(connection=st.integers(1, 2))
    def close(self, connection: int) -> None:
        self.state.connection_closed(connection, self.now_s)
        self.pinned = {pin: held for pin, held in self.pinned.items() if pin[0] != connection}

    @rule(key=KEYS, name=SEGMENTS)
    def corrupt(self, key: bytes, name: str) -> None:
        found = self.state.lookup([key], False, self.now_s)[0]
        if found is None:
            return
        held = {each.segment for each in found.replicas}
        assert self.state.report_corrupt(key, found.generation, name, self.now_s) == (name in held)
        left = self.state.lookup([key], False, self.now_s)[0]
        assert ({each.segment for each in left.replicas} if left else set()) == held - {name}

    @invariant()
    def agrees_with_itself(self) -> None:
        self.state.check_integrity()

    @invariant()
    def listeners_know_what_is_stored(self) -> None:
        stored, removed = self.state.take_changes() or ((), ())
        self.listener = self.listener - set(removed) | set(stored)
        assert self.listener == {key for part in self.state.snapshot() for key in part}

    def teardown(self) -> None:
        """When all promises are over and everything is removed, all space is free."""
        for connection in (1, 2):
            self.state.connection_closed(connection, self.now_s)
        self.state.remove([b"k%d" % number for number in range(12)], True, self.now_s)
        self.now_s += 29.0  # short of segment_ttl_s from the last heartbeat
        for name, incarnation in self.incarnations.items():
            self.state.heartbeat(name, incarnation, self.now_s)
        while self.state.tick(self.now_s):
            pass
        assert self.state.stats().used_nbytes == 0
        assert self.state.stats().num_objects == 0


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
