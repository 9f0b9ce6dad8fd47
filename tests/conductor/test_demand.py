"""What the workers could not be given, by the role that was short, and that the elastic rule sees it."""

from __future__ import annotations

import pytest
from worker_info import info

from moonpool.base.cluster import DecodeSample, PrefillSample, WorkerRole
from moonpool.base.errors import Overloaded
from moonpool.conductor.admission.forms import AdmissionForm, Cause
from moonpool.conductor.demand import UnmetDemand, UnmetWork
from moonpool.conductor.elastic import HOLD_S, REBALANCE_S
from moonpool.conductor.messages import RequestEnded, Route
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.placement.prefix_index import PrefixIndex
from moonpool.conductor.request_queue import RequestQueue
from moonpool.conductor.state import ConductorState

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
ONE = UnmetWork(1.5, 1, 100)
TTFT_S = 10.0


def test_a_request_counts_while_it_waits() -> None:
    unmet = UnmetDemand(TTFT_S)
    unmet.waits("a", ONE)
    unmet.waits("b", ONE)
    assert (unmet.of(PREFILL, 0.0), unmet.of(DECODE, 0.0)) == (UnmetWork(3.0, 2, 200), UnmetWork())
    unmet.short_of = DECODE
    assert (unmet.of(PREFILL, 0.0), unmet.of(DECODE, 0.0)) == (UnmetWork(), UnmetWork(3.0, 2, 200))
    unmet.left("a")
    unmet.left("a")
    assert unmet.of(DECODE, 99.0) == ONE
    unmet.left("b")
    assert unmet.of(DECODE, 99.0) == UnmetWork()


@pytest.mark.parametrize(
    ("cause", "waits_for", "role"),
    [
        (Cause.TTFT, None, PREFILL),
        (Cause.TBT, None, DECODE),
        (Cause.TOO_LATE, PREFILL, PREFILL),
        (Cause.TOO_LATE, DECODE, DECODE),
        (Cause.QUEUE_FULL, DECODE, DECODE),
        (Cause.GAVE_WAY, DECODE, DECODE),
        (Cause.TTFT, DECODE, DECODE),  # the queue before it does not move
        (Cause.TBT, PREFILL, DECODE),
        (Cause.PAGES, None, DECODE),
        (Cause.TOO_LONG, PREFILL, None),  # more workers would not help it
    ],
)
def test_a_refusal_counts_for_the_role_that_was_short(
    cause: Cause, waits_for: WorkerRole | None, role: WorkerRole | None
) -> None:
    unmet = UnmetDemand(TTFT_S)
    if waits_for is not None:
        unmet.waits("first", UnmetWork())
        unmet.short_of = waits_for
    unmet.refused(cause, ONE, 5.0)
    assert {one: unmet.of(one, 5.0) for one in WorkerRole if unmet.of(one, 5.0) != UnmetWork()} == (
        {} if role is None else {role: ONE}
    )


def test_refusals_count_for_as_long_as_they_would_have_waited() -> None:
    unmet = UnmetDemand(TTFT_S)
    for look in range(1000):
        unmet.refused(Cause.TTFT, ONE, look / 20)
    found = unmet.of(PREFILL, 50.0)
    assert found.num_seqs == pytest.approx(TTFT_S * 20, abs=2)
    assert unmet.of(PREFILL, 55.0).num_seqs == pytest.approx(found.num_seqs / 2, abs=2)
    assert unmet.of(PREFILL, 60.1) == UnmetWork()


class Cluster:
    """Two workers of each role. A prompt of 640 tokens takes a second; answers come 10 ms apart for each in a batch."""

    def __init__(self, *, queue_capacity: int | None = None, tbt_slo_s: float = 0.1) -> None:
        config = PolicyConfig(
            ttft_slo_s=TTFT_S, tbt_slo_s=tbt_slo_s, admission=AdmissionForm.EARLY, queue_capacity=queue_capacity
        )
        self.state = ConductorState(config, PrefixIndex(), 1000)
        for name in ("p0", "p1", "d0", "d1"):
            self.state.register(info(name, num_pages=10_000, max_num_seqs=64, fixed=False))
        self.state.costs.learn(
            prefills=[PrefillSample(tokens, 0, tokens / 640) for tokens in (10, 640, 6400)] * 9,
            decodes=[DecodeSample(num, num * 64, 0.01 * num) for num in (1, 5, 10, 20)] * 9,
        )
        self.queue = RequestQueue(self.state, config)
        self.sent: list[str] = []
        self.num_refused = 0

    def ask(self, request_id: str, num_tokens: int, now_s: float) -> None:
        call = Route(request_id=request_id, keys=[], num_tokens=num_tokens, max_tokens=2000)
        try:
            if self.queue.submit(call, "fe", now_s, now_s) is not None:
                self.sent.append(request_id)
        except Overloaded:
            self.num_refused += 1

    def look(self, now_s: float) -> str | None:
        """Look at the rule; return who changes, to which role."""
        self.queue.dispatch(now_s)
        self.state.roles.rebalance(self.state.workers, now_s)
        for worker in self.state.workers:
            assigned = self.state.roles.answer(worker.info)
            if assigned is not None:
                return f"{worker.info.name} {assigned.role}"
        return None


@pytest.mark.parametrize("queue_capacity", [None, 0])
def test_the_rule_sees_prompts_that_wait_and_prompts_that_were_refused(queue_capacity: int | None) -> None:
    """Workers have a quarter of the target as backlog when requests may wait, so they alone never look overloaded;
    without a queue they have all of it, and the rest is refused."""
    cluster, now_s = Cluster(queue_capacity=queue_capacity), 0.0
    for number in range(40):  # 40 s of work for two workers, which end none of it
        cluster.ask(f"r{number}", 640, now_s)
    assert cluster.num_refused > 0
    scaling = cluster.state.roles.scaling(cluster.state.workers, now_s)[PREFILL]
    assert scaling.pressure == pytest.approx(40 / 2 / TTFT_S, rel=0.1)
    assert scaling.slack_s == pytest.approx(TTFT_S - 20, rel=0.1)
    asked = [cluster.look(now_s + REBALANCE_S * look) for look in range(int(HOLD_S / REBALANCE_S) + 1)]
    assert asked[-1] == "d0 prefill"


def test_the_rule_sees_answers_that_wait_and_answers_that_were_refused() -> None:
    cluster = Cluster()
    for number in range(60):  # each worker can write nine answers in time; prompts take no time
        cluster.ask(f"r{number}", 1, 0.0)
        if cluster.sent and cluster.sent[-1] == f"r{number}":
            cluster.state.prefill_ended(f"r{number}", 0.0)
    assert len(cluster.sent) < 30
    assert len(cluster.queue) > 30
    scaling = cluster.state.roles.scaling(cluster.state.workers, 0.0)[DECODE]
    assert scaling.pressure == pytest.approx(60 / 2 * 0.01 / 0.1, rel=0.1)
    cluster.queue.dispatch(10.0)
    assert len(cluster.queue) == 0, "their targets cannot be met any more"
    assert cluster.state.roles.scaling(cluster.state.workers, 10.0)[DECODE].pressure == pytest.approx(3.0, rel=0.1)
    asked = [cluster.look(10.0 + REBALANCE_S * look) for look in range(int(HOLD_S / REBALANCE_S) + 1)]
    assert asked[-1] in ("p0 decode", "p1 decode")


def test_what_was_sent_or_cancelled_is_not_counted_twice() -> None:
    cluster = Cluster()
    for number in range(8):
        cluster.ask(f"r{number}", 640, 0.0)
    waiting = [f"r{number}" for number in range(8) if f"r{number}" not in cluster.sent]
    assert cluster.state.unmet.of(PREFILL, 0.0).num_seqs == len(waiting) > 0
    cluster.queue.cancel(waiting[-1], 0.0)
    for request_id in list(cluster.sent):
        cluster.state.request_ended(RequestEnded(request_id=request_id), 1.0)
    cluster.queue.dispatch(1.0)
    assert cluster.state.unmet.of(PREFILL, 1.0).num_seqs == len(cluster.queue)
    cluster.queue.owner_gone("fe", 1.0)
    assert cluster.state.unmet.of(PREFILL, 1.0) == UnmetWork()
