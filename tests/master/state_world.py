"""The world of the state machine: the state, what was promised of it, and what must be so after each step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from state_model import Claim, FakeNode, OpenPut, Stored, claims_on, held_puts, picture

from moonpool.master.rules import PoolRules
from moonpool.master.state import PoolState
from moonpool.master.state.changes import RemovalReason
from moonpool.master.state.recovery import restore
from moonpool.master.state.snapshot import snapshot_keys, snapshot_records
from moonpool.master.state.table import Flag
from moonpool.store import messages as m

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
    "hot_hits": 1,
    "hot_max_part": 0.4,
    "hot_window_s": 6.0,
    "order_timeout_s": 30.0,
    "offloads_in_flight": 3,
    "ssd_high_watermark": 0.8,
    "task_moves_in_flight": 2,
}
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4)
nodes = st.sampled_from(sorted(NODES))
picks = st.integers(0, 30)
rarely = st.integers(0, 3).map(lambda number: number == 3)
EVICTED = (
    RemovalReason.EVICTED_FOR_PUT,
    RemovalReason.EVICTED_FOR_HOT,
    RemovalReason.EVICTED_WATERMARK,
    RemovalReason.SSD_EVICTED,
)


class World(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["lru", "s3fifo", "prefix"]))
    def begin(self, policy: str) -> None:
        self.pool_rules = PoolRules(**RULES, eviction=policy)
        self.now_s, self.epoch, self.last_generation = 0.0, 1, 0
        self.state = PoolState(self.pool_rules, 1, journalled=True)
        restore(self.state, iter(()), 0.0)
        self.nodes = {name: FakeNode(name, has_ssd) for name, has_ssd in NODES.items()}
        self.incarnation = 0
        self.open: list[OpenPut] = []
        self.num_starts = 0
        self.stored: dict[bytes, Stored] = {}
        self.claims: list[Claim] = []
        # key, place, version and until when: what readers may read without asking
        self.remembered: list[tuple[bytes, m.Placement, int, float]] = []
        # key, places in memory and version: what readers remember, or have remembered, and may report to have read
        self.looked_up: list[tuple[bytes, list[m.Placement], int]] = []
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

    def node_starts(self, name: str) -> None:
        raise NotImplementedError

    def node_beats(self, name: str, whole: bool) -> None:
        raise NotImplementedError

    # what is promised

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

    def _is_kept(self, key: bytes, stored: Stored) -> bool:
        pinned = any(claim.owner[0] == "pin" and claim.owner[2:4] == (key, stored.generation) for claim in self.claims)
        return stored.hard or stored.lease_until_s > self.now_s or pinned

    # the master's death

    @rule()
    def snapshot_goes_on(self) -> None:
        self._take_records()
        if self.snapshot is None:
            self.snapshot = snapshot_records(self.state, self.now_s)
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
        before, held = picture(self.state), held_puts(self.state)
        self.epoch += 1
        self.snapshot = None
        self.state = PoolState(self.pool_rules, self.epoch, journalled=True)
        restore(self.state, iter(self.journal), self.now_s)
        assert picture(self.state) == before
        assert held.items() <= held_puts(self.state).items(), (
            "those that a process let go are held until it says so again"
        )
        self.state.check_integrity()
        self.listener = {key: tier for part in snapshot_keys(self.state.index) for key, tier in part}
        self.state.take_changes()
        places: set[tuple[str, int, int]] = set()
        for key, stored in self.stored.items():
            found = self.state.lookup([key], self.now_s, lease=False)[0]
            if found is not None:
                stored.lease_until_s = self.now_s + self.pool_rules.lease_s
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
                assert found.replicas
                self._is_really_there(key, found)
                stored.replicas = found.replicas
                stored.generations.update(each.generation for each in found.replicas)
                continue
            living = [each for each in stored.replicas if self._lives(each)]
            bad = all((each.segment, each.generation) in stored.maybe_bad for each in living)
            if slot is None:
                fate = self.state.index.removals.reason(key)
                assert fate is not None, f"the log has no reason for the removal of {key!r}"
                assert fate in EVICTED or bad, f"{key!r} was on {living} and is gone: {fate.name}"
                assert fate not in EVICTED or not self._is_kept(key, stored), "evicted though it was kept"
                assert fate in (*EVICTED, RemovalReason.CORRUPT) or not self._is_unreported(key, stored), (
                    f"{key!r} is on an SSD: {fate.name}"
                )
                del self.stored[key]
            else:
                assert table.flags[slot] & Flag.DORMANT
                assert bad or not self._is_kept(key, stored), "its memory was evicted though it was kept"

    def _is_unreported(self, key: bytes, stored: Stored) -> bool:
        """A node has written it to its log, and the master has not heard of it yet. What was written from a replica
        that turned out to be bad keeps nothing: nobody waits for it.
        """
        records = {(node.name, *record) for node in self.nodes.values() for record in node.log if record[0] == key}
        good = [record for record in records if (f"{record[0]}.dram", record[2]) not in stored.maybe_bad]
        return any(record in self.unreported and record[2] in stored.generations for record in good)

    @invariant()
    def readers_remember_no_value_that_a_settled_key_has_not(self) -> None:
        self.remembered = [each for each in self.remembered if each[3] > self.now_s]
        for key, place, version, _ in self.remembered:
            node = self.nodes[place.segment.split(".")[0]]
            is_there = node.alive and place.incarnation == node.dram and node.holds(key, place)
            is_there = is_there and place.generation not in node.void_generations
            if is_there and self.state.voids.are_settled([key], self.now_s):
                slot = self.state.index.table.find(key)
                assert slot is not None, f"{key!r} is gone, and a reader finds it at {place}"
                assert self.state.index.table.version[slot] == version, f"a reader finds an older {key!r} at {place}"

    @invariant()
    def nothing_comes_back(self) -> None:
        known = {key for part in snapshot_keys(self.state.index) for key, _ in part}
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
            assert self.listener == {key: tier for part in snapshot_keys(self.state.index) for key, tier in part}

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
            self.now_s += self.pool_rules.segment_ttl_s - 1
            while self.state.tick(self.now_s):
                pass
        self.state.check_integrity()
        assert self.state.stats().used_nbytes == 0
        assert self.state.stats().num_objects == 0
        assert len(self.state.index.table) == 0
