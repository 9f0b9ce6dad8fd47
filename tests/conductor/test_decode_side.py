"""The time to first token includes the wait for pages at the decode worker; the hand-off follows it."""

from __future__ import annotations

import msgspec
import pytest
from test_conductor_state import report, route, state_with
from worker_info import info

from moonpool.base.cluster import DecodeSample, PrefillSample, WorkerLoad
from moonpool.base.errors import Overloaded
from moonpool.conductor.costs import CostModels
from moonpool.conductor.messages import PrefillParts, RequestEnded
from moonpool.conductor.placement.decode_side import DecodeSide, prompt_nbytes
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.placement.pricing import PlacementRequest
from moonpool.conductor.state import ConductorState

REQUEST = PlacementRequest(num_tokens=100, max_tokens=28, block_tokens=16, block_nbytes=1000)  # 8 pages


def ended(
    request_id: str, *, output_tokens: int = 10, handoff_s: float | None = 0.05, outcome: str = "done"
) -> RequestEnded:
    parts = PrefillParts(queue_s=0.0, compute_s=0.1, handoff_s=handoff_s)
    return RequestEnded(request_id=request_id, output_tokens=output_tokens, outcome=outcome, parts=parts)


def test_pages_become_free_as_answers_end() -> None:
    side = DecodeSide(CostModels())
    for _ in range(500):
        side.learn(ended("r", output_tokens=200), 1000)
    wait_s = side.pages_s(REQUEST, free_pages=0, num_pages=80, tbt_s=0.05)
    assert wait_s == pytest.approx(8 / 80 * 200 * 0.05, rel=0.01)
    assert side.pages_s(REQUEST, 8, 80, 0.05) == 0.0, "it fits"
    assert side.pages_s(REQUEST, 4, 80, 0.05) == pytest.approx(4 / 76 * 200 * 0.05, rel=0.01)
    assert side.pages_s(REQUEST, -16, 80, 0.05) == pytest.approx(3 * wait_s), "others wait before it"
    assert side.pages_s(REQUEST, 4, 4, 0.05) == 0.0, "nothing ends at a worker without answers"


def test_a_hand_off_counts_once_it_was_measured() -> None:
    costs = CostModels()
    side = DecodeSide(costs)
    assert costs.handoff_s(1e9) == 0.0
    for nbytes in (1_000_000, 100_000_000) * 40:
        side.learn(ended("r", handoff_s=0.01 + nbytes * 1e-9), nbytes)
    assert costs.handoff_s(50_000_000) == pytest.approx(0.06, rel=0.05)
    for bad in (ended("r", outcome="cancelled", handoff_s=9.0), ended("r", output_tokens=1, handoff_s=None)):
        side.learn(bad, 1_000_000)
    assert costs.handoff_s(1_000_000) == pytest.approx(0.011, rel=0.1), "it has no hand-off, or was not answered"
    assert prompt_nbytes(REQUEST) == 7000


def serve(state: ConductorState, request_id: str, **fields: object) -> None:
    state.route(route(request_id, 2, **fields), "fe", 0.0, 0.0)
    state.prefill_ended(request_id, 1.0)
    state.request_ended(ended(request_id), 2.0)


def test_a_decision_predicts_the_hand_off() -> None:
    state = state_with("p0", "d0")
    before_s = state.route(route("first", 2), "fe", 0.0, 0.0).ttft_s
    state.request_ended(RequestEnded(request_id="first", outcome="failed"), 0.0)
    for number in range(20):
        serve(state, f"r{number}")
    decision = state.route(route("last", 2), "fe", 10.0, 0.0)
    [candidate] = decision.candidates
    assert candidate.handoff_s == pytest.approx(0.05, rel=0.1)
    assert decision.ttft_s == candidate.ttft_s == pytest.approx(before_s, rel=0.01), "the client has its token by then"
    assert candidate.service_s == pytest.approx(before_s, rel=0.01), "the prefill worker is free for the next one"
    state.request_ended(RequestEnded(request_id="last"), 11.0)
    short = msgspec.structs.replace(route("one", 2), max_tokens=1)
    one_token = state.route(short, "fe", 12.0, 0.0)
    assert one_token.candidates[0].handoff_s == 0.0, "an answer of one token needs no decode worker"


def test_a_request_that_would_wait_for_pages_too_long_is_refused() -> None:
    state = state_with("p0", policy=PolicyConfig(ttft_slo_s=1.0, queue_capacity=0))
    state.register(info("d0", num_pages=8))
    state.costs.learn(
        prefills=[PrefillSample(133, 0, 0.1)] * 20, decodes=[DecodeSample(num_seqs=8, kv_tokens=800, seconds=0.5)] * 20
    )
    assert state.route(route("fits", 2), "fe", 0.0, 0.0).ttft_s < 1.0
    state.request_ended(RequestEnded(request_id="fits", outcome="failed"), 0.0)
    state.report(report("d0", load=WorkerLoad(num_running=8, running_tokens=800, free_pages=0)))
    with pytest.raises(Overloaded, match="the first token would take"):
        state.route(route("waits", 2), "fe", 0.0, 0.0)
