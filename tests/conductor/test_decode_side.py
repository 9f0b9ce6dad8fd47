"""The time to first token includes the wait for pages at the decode worker; the hand-off follows it. Pages are counted
for what answers usually take, and each prompt's once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_conductor_state import report, route, state_with
from worker_info import info

from moonpool.base.cluster import DecodeSample, PrefillSample, WorkerLoad, WorkerRole
from moonpool.base.errors import Overloaded
from moonpool.conductor.admission.forms import Cause
from moonpool.conductor.admission.request_forecast import OutputLengths
from moonpool.conductor.costs import CostModels
from moonpool.conductor.messages import PrefillParts, RequestEnded, Route
from moonpool.conductor.placement.decode_side import DecodeSide, prompt_nbytes
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.placement.pricing import PlacementRequest
from moonpool.conductor.state import ConductorState

REQUEST = PlacementRequest(
    num_tokens=100, max_tokens=1000, block_tokens=16, block_nbytes=1000, expected_tokens=28
)  # 8 pages


def ended(
    request_id: str, *, output_tokens: int = 10, handoff_s: float | None = 0.05, outcome: str = "done"
) -> RequestEnded:
    parts = PrefillParts(queue_s=0.0, compute_s=0.1, handoff_s=handoff_s)
    return RequestEnded(request_id=request_id, output_tokens=output_tokens, outcome=outcome, parts=parts)


def test_pages_become_free_as_answers_end() -> None:
    lengths = OutputLengths()
    side = DecodeSide(CostModels(), lengths)
    for _ in range(500):
        lengths.learn("t", 200)
    wait_s = side.pages_s(REQUEST, free_pages=0, num_pages=80, tbt_s=0.05)
    assert wait_s == pytest.approx(8 / 80 * 200 * 0.05, rel=0.01)
    assert side.pages_s(REQUEST, 8, 80, 0.05) == 0.0, "it fits"
    assert side.pages_s(REQUEST, 4, 80, 0.05) == pytest.approx(4 / 76 * 200 * 0.05, rel=0.01)
    assert side.pages_s(REQUEST, -16, 80, 0.05) == pytest.approx(3 * wait_s), "others wait before it"
    assert side.pages_s(REQUEST, 4, 4, 0.05) == 0.0, "nothing ends at a worker without answers"


def test_a_hand_off_counts_once_it_was_measured() -> None:
    costs = CostModels()
    side = DecodeSide(costs, OutputLengths())
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
    with pytest.raises(Overloaded, match=r"the first token would take .* s until its decode worker has pages for it$"):
        state.route(route("waits", 2), "fe", 0.0, 0.0)
    assert state.refused == {Cause.PAGES: 1}
    refused = {role: state.unmet.of(role, 0.0).num_seqs for role in WorkerRole}
    assert refused == {WorkerRole.PREFILL: 0, WorkerRole.DECODE: 1}, "decode workers are short"


CONTEXT_TOKENS = 512 * 64


def chat(request_id: str, *, tenant: str = "", max_tokens: int | None = None) -> Route:
    """A short prompt, by default of a client that sets no limit."""
    limit = CONTEXT_TOKENS - 40 if max_tokens is None else max_tokens
    return Route(request_id=request_id, keys=[], num_tokens=40, max_tokens=limit, tenant=tenant)


def idle_state(num_pages: int = 2000, **policy: Any) -> ConductorState:
    """Prompts of 40 tokens take 10 ms, each token after them 50 ms."""
    state = state_with("p0", policy=PolicyConfig(**policy))
    state.register(info("d0", num_pages=num_pages, max_num_seqs=256))
    state.costs.learn(
        prefills=[PrefillSample(tokens, 0, tokens / 4000) for tokens in (40, 400, 4000)] * 9,
        decodes=[DecodeSample(num_seqs, num_seqs * 100, 0.05) for num_seqs in (1, 8, 64)] * 9,
    )
    return state


def free_pages(state: ConductorState) -> int:
    [worker] = [one for one in state.workers if not one.is_prefill]
    return worker.decode_pages[0]


def test_chats_that_set_no_limit_are_admitted_on_an_idle_service() -> None:
    """Each asks for a quarter of the pages, and is expected to take three."""
    state = idle_state(ttft_slo_s=4.0)
    for number in range(60):
        [candidate] = state.route(chat(f"r{number}"), "fe", 0.0, 0.0).candidates
        assert candidate.pages_s == 0.0


def test_the_elastic_rule_sees_the_pages_in_use_and_not_those_that_were_asked_for() -> None:
    state = idle_state()
    for number in range(12):
        state.route(chat(f"r{number}"), "fe", 0.0, 0.0)
    state.report(report("d0", load=WorkerLoad(num_running=12, running_tokens=7500, free_pages=1880), arrived=names(12)))
    pressure = state.roles.scaling(state.workers, 0.0)[WorkerRole.DECODE].pressure
    assert pressure == pytest.approx(120 / 2000)


def names(count: int) -> tuple[str, ...]:
    return tuple(f"r{number}" for number in range(count))


def test_the_pages_of_a_prompt_count_once() -> None:
    state = state_with("p0", "d0")

    def reported(sequence: int, *arrived: str, **load: int) -> int:
        state.report(report("d0", sequence, load=WorkerLoad(**load), arrived=arrived))
        return free_pages(state)

    for request_id in ("r0", "r1", "r2"):
        state.route(route(request_id, 10), "fe", 0.0, 0.0)  # eleven pages each
    assert free_pages(state) == 1000 - 33
    assert reported(1, free_pages=1000) == 1000 - 33, "the report was made before they came"
    assert reported(2, "r0", "r1", free_pages=989, waiting_pages=11) == 1000 - 33, "r0 has its pages, r1 waits for them"
    assert reported(3, "another conductor's", free_pages=980, waiting_pages=11) == 980 - 22, "the answer of r0 grows"
    state.request_ended(RequestEnded(request_id="r0"), 1.0)
    state.request_ended(RequestEnded(request_id="r2"), 1.0)
    assert free_pages(state) == 980 - 11, "r2 never came; the worker says when the pages of r0 are free"
    assert reported(4, "r2", free_pages=1000, waiting_pages=11) == 1000 - 11
    assert reported(5, free_pages=5, waiting_pages=25) == -20


def waits_for_pages(state: ConductorState, call: Route) -> bool:
    [candidate] = state.route(call, "fe", 0.0, 0.0).candidates
    state.request_ended(RequestEnded(request_id=call.request_id, outcome="failed"), 0.0)
    return candidate.pages_s > 0


def test_an_answer_is_expected_to_be_as_long_as_answers_were() -> None:
    state = idle_state()
    state.report(report("d0", load=WorkerLoad(num_running=8, free_pages=20)))
    assert not waits_for_pages(state, chat("before", tenant="long"))
    for number in range(300):
        tenant, output_tokens = ("long", 3200) if number % 2 else ("short", 20)
        state.route(chat(f"r{number}", tenant=tenant), "fe", 0.0, 0.0)
        outcome = "cancelled" if number % 3 else "done"
        state.request_ended(RequestEnded(request_id=f"r{number}", output_tokens=output_tokens, outcome=outcome), 1.0)
    state.report(report("d0", 2, load=WorkerLoad(num_running=8, free_pages=20)))
    assert waits_for_pages(state, chat("long", tenant="long"))
    assert not waits_for_pages(state, chat("short", tenant="short"))
    assert not waits_for_pages(state, chat("limited", tenant="long", max_tokens=1000))


def test_answers_that_failed_say_nothing_about_lengths() -> None:
    state = idle_state()
    for number in range(50):
        state.route(chat(f"r{number}"), "fe", 0.0, 0.0)
        state.request_ended(RequestEnded(request_id=f"r{number}", output_tokens=20_000, outcome="peer_lost"), 1.0)
    state.report(report("d0", load=WorkerLoad(num_running=8, free_pages=20)))
    assert not waits_for_pages(state, chat("next"))
