"""Cost models per kind of worker: what one kind measures says nothing about another."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_conductor_state import KEYS, report, route
from worker_info import info

from moonpool.base.cluster import DecodeSample, PrefillSample, PullSample, WorkerLoad
from moonpool.base.keys import object_key
from moonpool.conductor.messages import Decision, RequestEnded
from moonpool.conductor.placement.policy import POLICY_NAMES, PolicyConfig
from moonpool.conductor.placement.prefix_index import PrefixIndex
from moonpool.conductor.state import ConductorState

FAST, SLOW = "gpu", "cpu"
STEP_S = {FAST: 0.02, SLOW: 0.2}
PROMPT_S = {FAST: 0.1, SLOW: 3.0}  # of 640 tokens


def cluster(kinds: dict[str, str], policy: PolicyConfig | None = None) -> ConductorState:
    """Workers by their names, with these kinds; each has measured what its kind takes."""
    state = ConductorState(policy or PolicyConfig(), PrefixIndex(), 100)
    for name, kind in kinds.items():
        state.register(info(name, kind=kind))
    for name, kind in kinds.items():
        prefills = [PrefillSample(tokens, 0, PROMPT_S[kind] * tokens / 640) for tokens in (160, 320, 640)] * 10
        decodes = [DecodeSample(num_seqs, 100 * num_seqs, STEP_S[kind] * num_seqs) for num_seqs in (1, 2, 4)] * 10
        pulls = (PullSample(1 << 20, 2e-3),)
        state.report(report(name, prefills=tuple(prefills), decodes=tuple(decodes), pulls=pulls))
    return state


def test_each_worker_is_priced_by_its_own_kind() -> None:
    state = cluster({"p0": SLOW, "p1": FAST, "p2": SLOW, "d0": FAST})
    decision = state.route(route("r1", 10), "fe", 0.0, 0.0)
    assert decision.prefill.name == "p1"
    prefill_s = {one.worker: one.prefill_s for one in decision.candidates}
    assert prefill_s["p1"] == pytest.approx(PROMPT_S[FAST], rel=0.1)
    assert prefill_s["p0"] == prefill_s["p2"] == pytest.approx(PROMPT_S[SLOW], rel=0.1)


def test_the_fast_worker_gets_more_before_the_slow_one_gets_any() -> None:
    state = cluster({"p0": SLOW, "p1": FAST, "d0": FAST})
    chosen = [state.route(route(f"r{number}", 0), "fe", 0.0, 0.0).prefill.name for number in range(3)]
    assert chosen == ["p1", "p1", "p1"]


def test_the_decode_worker_with_the_shorter_steps_is_chosen() -> None:
    state = cluster({"p0": FAST, "d0": SLOW, "d1": FAST})
    state.report(report("d1", 2, load=WorkerLoad(num_running=3, running_tokens=300, free_pages=900)))
    decision = state.route(route("r1", 1), "fe", 0.0, 0.0)
    assert decision.decode.name == "d1", "with three answers it is still faster than the other one with none"
    assert decision.tbt_s == pytest.approx(4 * STEP_S[FAST], rel=0.2)
    state.report(report("d1", 3, load=WorkerLoad(num_running=8, running_tokens=800, free_pages=900)))
    assert state.route(route("r2", 1), "fe", 0.0, 0.0).decode.name == "d0", "it is full"


def test_a_slow_kind_pulls_what_a_fast_one_computes() -> None:
    """Pulling a block takes as long at both; computing it does not."""
    for kind, pulls in ((SLOW, 10), (FAST, 0)):
        state = cluster({"p0": kind, "p1": SLOW if kind is FAST else FAST, "d0": FAST})
        slow_pulls = tuple(PullSample(10 << 20, 0.5) for _ in range(200))
        for name in ("p0", "p1"):
            state.report(report(name, 2, pulls=slow_pulls))
        state.index.replace_pool([object_key(key) for key in KEYS])
        decision = state.route(route("r1", 10, exclude=("p1",)), "fe", 0.0, 0.0)
        assert decision.candidates[0].pulled_blocks == pulls, kind


def test_what_is_promised_holds_at_the_slowest_kind_that_decodes() -> None:
    state = cluster({"p0": FAST, "d0": FAST, "d1": SLOW})
    kinds = state._kinds
    assert kinds.decode_step_s(4, 400) == pytest.approx(4 * STEP_S[SLOW], rel=0.2)
    state.unregister(next(worker for worker in state.workers if worker.info.name == "d1"))
    assert kinds.decode_step_s(4, 400) == pytest.approx(4 * STEP_S[FAST], rel=0.2)


def test_errors_of_each_kind_are_told_apart() -> None:
    state = cluster({"p0": FAST, "p1": SLOW, "d0": FAST})
    names = [one.model for one in state.predictions() if one.count]
    assert {"prefill", f"prefill ({SLOW})", "decode"} <= set(names)


def play(kind: str, policy: str, seed: int) -> list[Decision]:
    rng = random.Random(seed)
    state = ConductorState(PolicyConfig(name=policy), PrefixIndex(), 100)
    for name in ("p0", "p1", "p2", "d0", "d1"):
        state.register(info(name, kind=kind))
    state.report(report("p0", prefills=(PrefillSample(640, 0, 1.0),), pulls=(PullSample(1 << 20, 0.01),)))
    state.index.replace_pool([object_key(key) for key in KEYS[: rng.randrange(11)]])
    decisions = []
    for number in range(12):
        decisions.append(state.route(route(f"r{number}", rng.randrange(11)), "fe", 0.1 * number, 0.0))
        if rng.random() < 0.3:
            state.request_ended(RequestEnded(request_id=f"r{rng.randrange(number + 1)}"), 0.1 * number)
    return decisions


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(POLICY_NAMES), st.integers(0, 1000))
def test_one_kind_is_as_none(policy: str, seed: int) -> None:
    encode = msgspec.json.encode
    assert encode(play("", policy, seed)) == encode(play("some gpu", policy, seed))
