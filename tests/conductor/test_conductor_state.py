"""The conductor's state: registrations, queues, owners and records, on a virtual clock."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from leading_runs import leading_blocks
from worker_info import info

from moonpool.base.cluster import PrefillSample, PullSample, ReportWorker, WorkerLoad
from moonpool.base.errors import IdentityMismatch, InvalidInput, NotFound, Overloaded, PromptTooLong, Unavailable
from moonpool.base.keys import object_key
from moonpool.conductor.messages import RequestEnded, Route
from moonpool.conductor.placement.policy import POLICY_NAMES, PolicyConfig
from moonpool.conductor.placement.prefix_index import PrefixIndex
from moonpool.conductor.placement.tables import Backlog, PrefillTable
from moonpool.conductor.records.store import RecordFilter
from moonpool.conductor.registration import Registration
from moonpool.conductor.state import ConductorState

KEYS = [bytes([number]) * 32 for number in range(10)]


def report(name: str, sequence: int = 1, incarnation: int = 1, **fields: Any) -> ReportWorker:
    fields.setdefault("load", WorkerLoad(free_pages=1000))
    return ReportWorker(name=name, incarnation=incarnation, sequence=sequence, **fields)


def route(request_id: str, num_blocks: int = 10, **fields: Any) -> Route:
    return Route(request_id=request_id, keys=KEYS[:num_blocks], num_tokens=num_blocks * 64 + 5, max_tokens=16, **fields)


def state_with(*names: str, policy: PolicyConfig | None = None) -> ConductorState:
    state = ConductorState(policy or PolicyConfig(), PrefixIndex(), 100)
    for name in names:
        state.register(info(name))
    state.costs.learn(pulls=[PullSample(1 << 20, 2e-3)])
    return state


def assigned(state: ConductorState) -> dict[str, int]:
    return {one.info.name: one.assigned for one in state.status()}


def test_requests_spread_over_idle_workers_and_leave_when_they_end() -> None:
    state = state_with("p0", "p1", "d0", "d1")
    one = state.route(route("r1", 0), "fe", 0.0, 0.0)
    two = state.route(route("r2", 0), "fe", 0.0, 0.0)
    assert (one.prefill.name, two.prefill.name) == ("p0", "p1")
    assert (one.decode.name, two.decode.name) == ("d0", "d1")
    state.prefill_ended("r1", 1.0)
    state.prefill_ended("r1", 1.0)
    assert assigned(state) == {"p0": 0, "p1": 1, "d0": 1, "d1": 1}
    state.request_ended(RequestEnded(request_id="r1"), 2.0)
    state.request_ended(RequestEnded(request_id="r2"), 2.0)
    state.request_ended(RequestEnded(request_id="never heard of"), 2.0)
    assert assigned(state) == {"p0": 0, "p1": 0, "d0": 0, "d1": 0}
    assert state.num_open == 0


def test_the_same_prefix_follows_its_blocks() -> None:
    state = state_with("p0", "p1", "d0")
    state.report(report("p1", cached=tuple(KEYS)))
    decision = state.route(route("r1"), "fe", 0.0, 0.0)
    assert decision.prefill.name == "p1"
    assert {one.worker: one.local_blocks for one in decision.candidates} == {"p0": 0, "p1": 10}


def test_a_prefix_on_its_way_to_a_worker_counts_there() -> None:
    state = state_with("p0", "p1", "d0")
    state.costs.learn(prefills=[PrefillSample(640, 0, 60.0)])
    first = state.route(route("r1"), "fe", 0.0, 0.0)
    second = state.route(route("r2"), "fe", 59.0, 0.0)
    assert first.prefill == second.prefill
    state.request_ended(RequestEnded(request_id="r1", outcome="failed"), 60.0)
    state.request_ended(RequestEnded(request_id="r2", outcome="failed"), 60.0)
    third = state.route(route("r3"), "fe", 61.0, 0.0)
    assert [one.local_blocks for one in third.candidates] == [0, 0]


def test_the_pool_is_pulled_from() -> None:
    state = state_with("p0", "d0")
    state.index.replace_pool([object_key(key) for key in KEYS[:7]])
    decision = state.route(route("r1"), "fe", 0.0, 0.0)
    assert decision.pool_blocks == decision.candidates[0].pulled_blocks == 7
    assert decision.ttft_s == pytest.approx(decision.candidates[0].ttft_s)


def test_excluded_workers_are_never_chosen() -> None:
    state = state_with("p0", "p1", "d0", "d1")
    decision = state.route(route("r1", exclude=("p0", "d0")), "fe", 0.0, 0.0)
    assert (decision.prefill.name, decision.decode.name) == ("p1", "d1")
    with pytest.raises(Unavailable, match="no prefill"):
        state.route(route("r2", exclude=("p0", "p1")), "fe", 0.0, 0.0)
    with pytest.raises(Unavailable, match="no decode"):
        state.route(route("r2", exclude=("d0", "d1")), "fe", 0.0, 0.0)


def test_routing_again_takes_the_earlier_assignment_back() -> None:
    state = state_with("p0", "p1", "d0", "d1")
    state.route(route("r1"), "fe", 0.0, 0.0)
    state.route(route("r1", exclude=("p0", "d0")), "fe", 1.0, 0.0)
    assert assigned(state) == {"p0": 0, "p1": 1, "d0": 0, "d1": 1}
    assert [(one.request_id, one.attempt) for one in state.records.find(RecordFilter(), 9)] == [("r1", 2)]


def test_a_lost_worker_is_out_at_once_and_comes_back_empty() -> None:
    state = state_with("p0", "d0")
    worker = state.register(info("p1"))
    state.report(report("p1", cached=tuple(KEYS)))
    state.route(route("r1"), "fe", 0.0, 0.0)
    state.unregister(worker)
    assert assigned(state) == {"d0": 1, "p0": 0}
    state.register(info("p1", incarnation=2))
    assert assigned(state) == {"d0": 1, "p0": 0, "p1": 0}
    decision = state.route(route("r1", exclude=("p0",)), "fe", 0.0, 0.0)
    assert decision.prefill.incarnation == 2
    assert decision.candidates[0].local_blocks == 0


def test_a_late_goodbye_does_not_hurt_the_successor() -> None:
    state = state_with("d0")
    old = state.register(info("p0"))
    state.register(info("p0", incarnation=2))
    state.unregister(old)
    assert state.route(route("r1"), "fe", 0.0, 0.0).prefill.incarnation == 2
    with pytest.raises(NotFound, match="not registered"):
        state.report(report("p0", incarnation=1))
    state.report(report("p0", incarnation=2))


@pytest.mark.parametrize("changes", [{"identity": b"\2" * 32}, {"model": "other"}, {"block_tokens": 32}])
def test_workers_that_cannot_share_are_refused(changes: dict[str, object]) -> None:
    state = state_with("p0")
    with pytest.raises(IdentityMismatch, match="cannot share KV"):
        state.register(info("d0", **changes))
    state.register(info("p0", incarnation=2, **changes))  # alone, it may become another


def test_a_report_gap_asks_for_a_new_registration() -> None:
    state = state_with("p0", "d0")
    state.report(report("p0", 1, cached=tuple(KEYS)))
    with pytest.raises(NotFound, match="register again"):
        state.report(report("p0", 3, load=WorkerLoad(num_waiting=7)))
    worker = next(one for one in state.status() if one.info.name == "p0")
    assert (worker.indexed_blocks, worker.load.num_waiting) == (0, 7)
    state.report(report("d0", 9))  # a decode worker's pages are not indexed


def test_a_front_end_that_goes_takes_its_requests_along() -> None:
    state = state_with("p0", "d0")
    state.route(route("r1"), "one", 0.0, 0.0)
    state.route(route("r2"), "two", 0.0, 0.0)
    state.owner_gone("one", 1.0)
    assert assigned(state) == {"p0": 1, "d0": 1}
    assert [one.outcome for one in state.records.find(RecordFilter(), 9)] == ["abandoned", "open"]


def test_records_say_what_was_predicted_and_measured() -> None:
    state = state_with("d0", policy=PolicyConfig(ttft_slo_s=5.0))
    state.register(info("p0", num_pages=10**6))
    decision = state.route(route("r1"), "fe", 0.0, 123.0)
    state.request_ended(
        RequestEnded(request_id="r1", ttft_s=0.5, cached_tokens=64, pool_tokens=64, output_tokens=9), 1.0
    )
    with pytest.raises(Overloaded):
        state.route(Route(request_id="r2", keys=[], num_tokens=10**6, max_tokens=1), "fe", 2.0, 124.0)
    done, refused = state.records.find(RecordFilter(), 9)
    assert (done.routed_at_s, done.predicted_ttft_s, done.measured_ttft_s) == (123.0, decision.ttft_s, 0.5)
    assert (done.outcome, done.cached_tokens, done.output_tokens) == ("done", 64, 9)
    assert (refused.outcome, refused.prefill) == ("overloaded", None)
    assert state.counters["overloaded"] == 1


def test_a_request_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidInput):
        state_with("p0", "d0").route(Route(request_id="r", keys=[], num_tokens=0, max_tokens=1), "fe", 0.0, 0.0)


def test_a_prompt_longer_than_every_worker_is_refused_and_leaves_no_record() -> None:
    state = state_with("p0", "d0")
    fits = Route(request_id="fits", keys=[], num_tokens=64_000, max_tokens=1)
    state.route(fits, "fe", 0.0, 0.0)
    with pytest.raises(PromptTooLong, match="64001 tokens, the largest worker holds 64000"):
        state.route(msgspec.structs.replace(fits, request_id="long", num_tokens=64_001), "fe", 0.0, 0.0)
    assert state.records.get("long") is None


def test_decode_load_counts_what_is_on_its_way_and_what_is_reported() -> None:
    state = state_with("p0", "d0", "d1")
    state.report(report("d0", load=WorkerLoad(num_running=3, running_tokens=3000, free_pages=900)))
    assert state.route(route("r1"), "fe", 0.0, 0.0).decode.name == "d1"
    state.report(report("d1", load=WorkerLoad(free_pages=2)))
    assert state.route(route("r2"), "fe", 0.0, 0.0).decode.name == "d0"


def wait_s(backlog: Backlog, now_s: float) -> float:
    """How long a new request waits at a worker with this backlog."""
    table = PrefillTable()
    table.add(0, "p")
    table.update(0, backlog)
    return table.wait_s(now_s).item(0)


def test_backlog_counts_the_time_the_head_has_had() -> None:
    backlog = Backlog()
    assert wait_s(backlog, 0.0) == 0.0
    backlog.add("a", 2.0, 10.0)
    backlog.add("b", 3.0, 10.5)
    assert wait_s(backlog, 11.0) == pytest.approx(4.0)
    assert wait_s(backlog, 99.0) == pytest.approx(3.0)
    backlog.remove("a", 13.0)
    assert wait_s(backlog, 13.0) == pytest.approx(3.0)
    backlog.remove("b", 14.0)
    backlog.remove("b", 14.0)
    assert (wait_s(backlog, 14.0), len(backlog)) == (0.0, 0)


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: the queues hold exactly the open requests of the living."""

    def __init__(self) -> None:
        super().__init__()
        self.state = state_with()
        self.now_s = 0.0
        self.workers: dict[str, list[Registration]] = {}

    @rule(name=st.sampled_from(["p0", "p1", "d0", "d1"]), incarnation=st.integers(1, 3))
    def register(self, name: str, incarnation: int) -> None:
        self.workers.setdefault(name, []).append(self.state.register(info(name, incarnation=incarnation)))

    @rule(name=st.sampled_from(["p0", "p1", "d0", "d1"]), which=st.integers(0, 9))
    def goodbye(self, name: str, which: int) -> None:
        if self.workers.get(name):
            self.state.unregister(self.workers[name][which % len(self.workers[name])])

    @rule(number=st.integers(0, 5), blocks=st.integers(0, 10), owner=st.sampled_from("xy"))
    def route(self, number: int, blocks: int, owner: str) -> None:
        self.now_s += 0.1
        try:
            decision = self.state.route(route(f"r{number}", blocks), owner, self.now_s, 0.0)
        except Unavailable:
            return
        best = min(decision.candidates, key=lambda one: one.ttft_s)
        assert decision.candidates[0].ttft_s == decision.ttft_s <= best.ttft_s + 0.05 * best.service_s  # tie_slack

    @rule(number=st.integers(0, 5))
    def prefilled(self, number: int) -> None:
        self.state.prefill_ended(f"r{number}", self.now_s)

    @rule(number=st.integers(0, 5))
    def ended(self, number: int) -> None:
        self.state.request_ended(RequestEnded(request_id=f"r{number}"), self.now_s)

    @rule(owner=st.sampled_from("xy"))
    def front_end_gone(self, owner: str) -> None:
        self.state.owner_gone(owner, self.now_s)

    @invariant()
    def no_more_assigned_than_open(self) -> None:
        for role in "pd":
            total = sum(count for name, count in assigned(self.state).items() if name.startswith(role))
            assert total <= self.state.num_open

    @invariant()
    def nothing_is_expected_when_nothing_is_open(self) -> None:
        if self.state.num_open == 0:
            assert set(leading_blocks(self.state.index, KEYS)[1].values()) <= {0}
            assert sum(assigned(self.state).values()) == 0


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_errors_of_whole_requests_are_kept() -> None:
    state = state_with("p0", "d0")
    decision = state.route(route("r1"), "fe", 0.0, 0.0)
    state.request_ended(
        RequestEnded(request_id="r1", ttft_s=decision.ttft_s / 2, tbt_s=decision.tbt_s, output_tokens=9), 1.0
    )
    state.route(route("r2"), "fe", 2.0, 0.0)
    state.request_ended(RequestEnded(request_id="r2", ttft_s=99.0, outcome="cancelled"), 3.0)  # says nothing
    errors = {one.model: one for one in state.predictions()}
    assert (errors["ttft"].count, errors["tbt"].count) == (1, 1)
    assert (errors["ttft"].p50, errors["ttft"].bias, errors["tbt"].p90) == pytest.approx((1, 1, 0))
    models = {"prefill", "decode", "transfer", "transfer_ssd", "handoff"}
    assert set(errors) == models | {"ttft", "tbt", "decode_load"}


def test_fetch_or_compute_by_what_was_measured() -> None:
    state = state_with()
    assert state.fetch_or_compute() is None
    state.register(info("p0"))
    state.costs.learn(
        prefills=[PrefillSample(tokens, 0, tokens * 1e-4) for tokens in (100, 1000, 10_000)],
        pulls=[PullSample(nbytes, nbytes / 1e9) for nbytes in (1 << 20, 1 << 25, 1 << 28)],
    )
    found = state.fetch_or_compute()
    assert found is not None
    assert found.measured_nbytes_s == pytest.approx(1e9, rel=0.2)
    assert found.break_even_nbytes_s == pytest.approx((1 << 20) / 64 / 1e-4, rel=0.3)
    assert (found.num_prefills, found.num_pulls) == (3, 4)


def test_pulls_on_their_way_are_known_until_their_prefill_ends() -> None:
    state = state_with("p0", "p1", "d0")
    state.index.replace_pool([object_key(key) for key in KEYS])
    first = state.route(route("r1"), "fe", 0.0, 0.0)
    assert first.max_pool_blocks is None
    second = state.route(route("r2"), "fe", 0.0, 0.0)  # the first has begun by now
    assert second.candidates[0].congestion_s > 0
    assert second.prefill != first.prefill
    state.prefill_ended("r1", 0.001)
    state.prefill_ended("r2", 0.001)
    assert state.traffic.num_flows == 0
    assert state.route(route("r3"), "fe", 0.001, 0.0).candidates[0].congestion_s == 0


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_serves_a_whole_day(policy: str) -> None:
    rng, names = random.Random(3), ["p0", "p1", "p2", "p3", "d0", "d1"]
    state = state_with(*names, policy=PolicyConfig(name=policy))
    state.index.replace_pool([object_key(key) for key in KEYS[:7]])
    for number in range(300):
        state.route(route(f"r{number}", rng.randrange(11)), "fe", number / 10, 0.0)
        if number >= 20:
            state.prefill_ended(f"r{number - 10}", number / 10)
            state.request_ended(RequestEnded(request_id=f"r{number - 20}"), number / 10)
    used = {one.prefill for one in state.records.find(RecordFilter(), 300)}
    assert used == {"p0", "p1", "p2", "p3"}
    state.owner_gone("fe", 99.0)
    assert set(assigned(state).values()) == {0}
    assert state.traffic.num_flows == 0
