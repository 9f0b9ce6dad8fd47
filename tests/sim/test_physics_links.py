"""Shared links: max-min fairness, conservation and the order of ends, against a naive reference."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moonpool.base.errors import InvalidInput
from moonpool.sim.physics.links import Flow, Network

LINKS = "abcdefgh"


# --- the reference: everything anew at each event, progressive filling in the plainest way ---


@dataclass
class NaiveFlow:
    tag: int
    route: tuple[str, ...]
    left: float
    rate: float = 0.0


@dataclass
class NaiveNetwork:
    capacities: dict[str, float]
    now_s: float = 0.0
    flows: list[NaiveFlow] = field(default_factory=list)
    ends: dict[int, float] = field(default_factory=dict)
    crossed: dict[str, float] = field(default_factory=dict)

    def share_out(self) -> None:
        left = dict(self.capacities)
        open_flows = list(self.flows)
        while open_flows:
            users = {name: [f for f in open_flows if name in f.route] for name in left}
            name = min((n for n in left if users[n]), key=lambda n: left[n] / len(users[n]))
            share = max(0.0, left[name] / len(users[name]))
            for flow in users[name]:
                flow.rate = share
                for each in flow.route:
                    left[each] -= share
            open_flows = [f for f in open_flows if f not in users[name]]

    def advance(self, now_s: float) -> None:
        while True:
            self.share_out()
            due = min((self.now_s + f.left / f.rate for f in self.flows if f.rate > 0), default=math.inf)
            until = min(due, now_s)
            for flow in self.flows:
                moved = flow.rate * (until - self.now_s)
                flow.left -= moved
                for name in flow.route:
                    self.crossed[name] = self.crossed.get(name, 0.0) + moved
            done = [f for f in self.flows if f.left <= 1e-9 * max(1.0, f.rate)]
            self.ends.update({flow.tag: until for flow in done})
            self.flows = [f for f in self.flows if f not in done]
            self.now_s = until
            if due > now_s:
                return


def tag_of(flow: Flow) -> int:
    assert isinstance(flow.tag, int)
    return flow.tag


def check_fair(network: Network, flows: list[Flow], capacities: dict[str, float]) -> None:
    """No link above its capacity, and every flow has a full link on which nobody gets more."""
    active = [flow for flow in flows if not flow.is_done and flow.nbytes]
    on = {name: [f for f in active if name in [link.name for link in f.route]] for name in capacities}
    for name, users in on.items():
        assert sum(f.rate for f in users) <= capacities[name] * (1 + 1e-9)
    for flow in active:
        rate = flow.rate
        assert any(
            sum(f.rate for f in on[link.name]) >= capacities[link.name] * (1 - 1e-9)
            and all(f.rate <= rate * (1 + 1e-9) for f in on[link.name])
            for link in flow.route
        )


capacity_maps = st.fixed_dictionaries({name: st.sampled_from([1.0, 2.0, 3.0, 7.5, 10.0, 100.0]) for name in LINKS})
routes = st.lists(st.sampled_from(LINKS), min_size=1, max_size=3, unique=True).map(tuple)
starts = st.tuples(st.sampled_from([0.0, 0.0, 0.1, 0.5, 3.0]), routes, st.sampled_from([0.5, 1.0, 10.0, 33.3, 250.0]))
changes = st.tuples(
    st.sampled_from([0.1, 0.7, 2.0]), st.sampled_from(LINKS), st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.none()
)


STOPPED_AT_ITS_END = [  # a link stops at the moment at which its flow has all but a rounding error
    (0.1, "a", 0.0, None),
    (0.7, "a", 0.0, None),
    (0.0, ("a",), 0.5),
    (0.1, "a", 0.25, None),
    (3.0, ("a",), 0.5),
    (0.1, "a", 0.25, None),
    (0.1, "a", 0.25, None),
    (0.1, ("b",), 0.5),
    (0.7, "a", 0.0, None),
    (0.0, ("a",), 0.5),
    (0.1, ("a",), 0.5),
]


@settings(max_examples=300, deadline=None)
@given(capacity_maps, st.lists(st.one_of(starts, changes), min_size=1, max_size=30))
@example(dict.fromkeys(LINKS, 1.0) | {"a": 2.0}, STOPPED_AT_ITS_END)
def test_equals_the_naive_reference(capacities: dict[str, float], script: list[tuple[Any, ...]]) -> None:
    network, naive = Network(capacities), NaiveNetwork(dict(capacities))
    flows: list[Flow] = []
    ended: list[Flow] = []
    now_s = 0.0
    for tag, (gap_s, *what) in enumerate(script):
        now_s += gap_s
        ended += network.advance(now_s)
        naive.advance(now_s)
        if len(what) == 3:
            name, share, _ = what
            network.slow(now_s, name, share)
            naive.capacities[name] = capacities[name] * share
        else:
            flows.append(network.start(now_s, what[0], what[1], tag))
            naive.flows.append(NaiveFlow(tag, what[0], what[1]))
        check_fair(network, flows, naive.capacities)
    for name in LINKS:
        network.restore(now_s, name)
        naive.capacities[name] = capacities[name]
    while (upcoming := network.next_end()) is not None:
        ended += network.advance(upcoming[0])
        check_fair(network, flows, capacities)
    naive.advance(ended[-1].end_s + 1.0 if ended else now_s)
    assert sorted(map(tag_of, ended)) == [tag_of(flow) for flow in flows]
    assert [flow.end_s for flow in ended] == sorted(flow.end_s for flow in ended)
    for flow in flows:
        assert flow.end_s == pytest.approx(naive.ends[tag_of(flow)], rel=1e-9, abs=1e-9)
    for name in LINKS:  # bytes are conserved
        sent = sum(flow.nbytes for flow in flows if name in [link.name for link in flow.route])
        assert naive.crossed.get(name, 0.0) == pytest.approx(sent, rel=1e-6, abs=1e-6)
        _, per_bucket = network.nbytes_over_time(name)
        assert per_bucket.sum() == pytest.approx(sent, rel=1e-9, abs=1e-9)


def test_a_lone_flow_gets_its_narrowest_link() -> None:
    network = Network({"out": 10.0, "in": 4.0})
    flow = network.start(1.0, ("out", "in"), 8.0, "x")
    assert flow.rate == 4.0
    assert network.next_end() == (3.0, flow)
    assert network.advance(2.9) == []
    assert network.left_nbytes(flow) == pytest.approx(0.4)
    assert network.advance(5.0) == [flow]
    assert (flow.end_s, network.nbytes_over_time("out")[1].sum()) == (3.0, 8.0)
    assert network.next_end() is None


def test_what_a_narrow_flow_leaves_goes_to_the_others() -> None:
    network = Network({"nic": 9.0, "disk": 1.0})
    slow = network.start(0.0, ("nic", "disk"), 100.0)
    wide = [network.start(0.0, ("nic",), 100.0) for _ in range(2)]
    assert [flow.rate for flow in (slow, *wide)] == [1.0, 4.0, 4.0]


def test_a_change_is_felt_over_several_links() -> None:
    """The first flow leaves a, so x gets more there and takes more of b, so y gets less and leaves more of c to z."""
    network = Network({"a": 2.0, "b": 10.0, "c": 10.0})
    leaving = network.start(0.0, ("a",), 1.0)
    x = network.start(0.0, ("a", "b"), 1000.0)
    y = network.start(0.0, ("b", "c"), 1000.0)
    z = network.start(0.0, ("c",), 1000.0)
    network.slow(0.0, "b", 0.3)
    assert [flow.rate for flow in (leaving, x, y, z)] == pytest.approx([1.0, 1.0, 2.0, 8.0])
    assert network.advance(1.0) == [leaving]
    assert [flow.rate for flow in (x, y, z)] == pytest.approx([1.5, 1.5, 8.5])


def test_equal_ends_come_in_the_order_of_the_starts() -> None:
    network = Network(dict.fromkeys(LINKS, 1.0))
    flows = [network.start(0.0, (name,), 2.0) for name in reversed(LINKS)]
    flows += [network.start(1.0, (name,), 0.5) for name in LINKS]  # all sixteen end at 2.0 or 2.5
    ended = network.advance(10.0)
    assert ended == flows[8:] + flows[:8]
    assert {flow.end_s for flow in ended} == {2.0, 2.5}


def random_mesh(seed: int, num_nodes: int, num_flows: int, num_ends: int) -> tuple[Network, list[Flow]]:
    """A network of NICs kept busy by flows between random nodes."""
    rng = random.Random(seed)
    network = Network({f"{side}{node}": 86e9 for node in range(num_nodes) for side in ("out", "in")})
    flows: list[Flow] = []

    def start(now_s: float) -> None:
        route = (f"out{rng.randrange(num_nodes)}", f"in{rng.randrange(num_nodes)}")
        flows.append(network.start(now_s, route, rng.uniform(1e6, 5e9)))

    for _ in range(num_flows):
        start(3000.0)
    for _ in range(num_ends):
        upcoming = network.next_end()
        assert upcoming is not None
        for _ in network.advance(upcoming[0]):
            start(upcoming[0])
    return network, flows


@pytest.mark.parametrize(("num_nodes", "num_flows"), [(16, 64), (60, 60), (200, 100)])
def test_a_long_run_stays_fair_and_loses_no_byte(num_nodes: int, num_flows: int) -> None:
    network, flows = random_mesh(1, num_nodes, num_flows, 1500)
    capacities = {f"{side}{node}": 86e9 for node in range(num_nodes) for side in ("out", "in")}
    check_fair(network, flows, capacities)
    moved = dict.fromkeys(capacities, 0.0)
    for flow in flows:
        for link in flow.route:
            moved[link.name] += flow.nbytes - network.left_nbytes(flow)
    for name, nbytes in moved.items():
        assert network.nbytes_over_time(name)[1].sum() == pytest.approx(nbytes, rel=1e-9)


def test_the_same_run_gives_the_same_bits() -> None:
    one, other = (random_mesh(7, 16, 40, 500)[1] for _ in range(2))
    assert [(flow.end_s, flow.rate, flow.seq) for flow in one] == [(flow.end_s, flow.rate, flow.seq) for flow in other]


def test_a_flow_without_bytes_ends_at_once_and_disturbs_nobody() -> None:
    network = Network({"a": 1.0})
    busy = network.start(0.0, ("a",), 5.0)
    empty = network.start(1.0, ("a",), 0)
    assert network.advance(1.0) == [empty]
    assert network.advance(5.0) == [busy]


def test_a_failed_link_drops_its_flows_and_new_ones_wait() -> None:
    network = Network({"a": 2.0, "b": 2.0})
    cut, kept = network.start(0.0, ("a", "b"), 10.0), network.start(0.0, ("b",), 10.0)
    assert network.fail(2.0, "a") == [cut]
    assert (cut.is_done, cut.left_nbytes, kept.rate) == (True, 8.0, 2.0)
    waiting = network.start(3.0, ("a", "b"), 4.0)
    assert (waiting.rate, waiting.end_s) == (0.0, math.inf)
    assert network.advance(6.0) == [kept]
    network.restore(10.0, "a")
    assert network.advance(12.0) == [waiting]
    assert network.nbytes_over_time("b")[1].sum() == pytest.approx(16.0)


def test_use_over_time_is_kept_in_bounded_memory() -> None:
    network = Network({"a": 1.0})
    network.start(0.0, ("a",), 3.5)
    network.advance(100.0)
    bucket_s, used = network.nbytes_over_time("a")
    assert (bucket_s, list(used[:5])) == (1.0, [1.0, 1.0, 1.0, 0.5, 0.0])
    network.start(100.0, ("a",), 50_000.0)
    network.advance(90_000.0)
    bucket_s, used = network.nbytes_over_time("a")
    assert bucket_s * 256 > 90_000
    assert len(used) <= 256
    assert used.sum() == pytest.approx(50_003.5)
    assert used[1] == pytest.approx(bucket_s)


@pytest.mark.parametrize(
    ("route", "nbytes"), [((), 1.0), (("a", "a"), 1.0), (("nowhere",), 1.0), (("a",), -1.0), (("a",), math.nan)]
)
def test_impossible_flows_are_refused_and_leave_nothing(route: tuple[str, ...], nbytes: float) -> None:
    network = Network({"a": 1.0})
    with pytest.raises(InvalidInput):
        network.start(0.0, route, nbytes)
    assert network.next_end() is None


def test_time_must_not_go_back_nor_skip_an_end() -> None:
    network = Network({"a": 1.0})
    network.start(1.0, ("a",), 1.0)
    with pytest.raises(InvalidInput, match="back"):
        network.start(0.5, ("a",), 1.0)
    with pytest.raises(InvalidInput, match="advance"):
        network.start(3.0, ("a",), 1.0)
