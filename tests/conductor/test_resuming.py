"""Answers that go on at another decode worker: which ones need no prefill worker, and what is counted for them."""

from __future__ import annotations

import pytest
from test_conductor_state import KEYS, assigned, route, state_with

from moonpool.base.cluster import AssignedRole, CountOthers, WorkerRole
from moonpool.base.keys import object_key
from moonpool.conductor.messages import RequestEnded
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.records.explain import explain
from moonpool.conductor.request_queue import RequestQueue
from moonpool.conductor.retries import Retries, RetryPolicy


@pytest.mark.parametrize(
    ("num_stored", "fields", "resumes"),
    [
        (10, {}, False),  # a prompt that the pool has
        (10, {"has_output": True}, True),
        (6, {"has_output": True}, True),
        (5, {"has_output": True}, False),  # five blocks are missing: a prefill worker computes them
        (0, {"has_output": True, "is_stored": True}, True),  # the index is behind
        (0, {"has_output": True}, False),
    ],
)
def test_the_pool_must_have_most_of_the_kv(num_stored: int, fields: dict[str, bool], resumes: bool) -> None:
    state = state_with("p0", "d0")
    state.index.replace_pool([object_key(key) for key in KEYS[:num_stored]])
    decision = state.route(route("r1", **fields), "fe", 0.0, 0.0)
    assert decision.resumes is resumes
    assert decision.prefill.name == ("d0" if resumes else "p0")
    assert decision.decode.name == "d0"


def test_only_the_decode_worker_counts_it() -> None:
    state = state_with("p0", "d0", "d1")
    state.route(route("r1"), "fe", 0.0, 0.0)
    state.prefill_ended("r1", 1.0)
    [(before, _)] = [(one.num_joined, one) for one in state.workers if one.num_decoding]
    assert before == 1
    decision = state.route(route("r1", has_output=True, is_stored=True, exclude=("d0",)), "fe", 2.0, 0.0)
    assert (decision.decode.name, decision.ttft_s, decision.candidates) == ("d1", 0.0, ())
    assert assigned(state) == {"p0": 0, "d0": 0, "d1": 1}
    assert {one.info.name: one.num_joined for one in state.workers if not one.is_prefill} == {"d0": 0, "d1": 1}
    [kept] = state.records.of_client("r1")
    assert "Its answer went on at d1, which took its KV from the pool." in explain(kept.record, state.block_tokens)
    state.request_ended(RequestEnded(request_id="r1"), 3.0)
    assert assigned(state) == {"p0": 0, "d0": 0, "d1": 0}


def test_it_waits_in_no_queue_and_is_not_refused() -> None:
    """It was admitted once; others wait because prefill workers are busy."""
    policy = PolicyConfig(ttft_slo_s=0.001, tbt_slo_s=1e-9)
    state = state_with("p0", "d0", policy=policy)
    queue = RequestQueue(state, policy)
    decision = queue.submit(route("r1", has_output=True, is_stored=True), "fe", 0.0, 0.0)
    assert decision is not None
    assert decision.resumes


def test_workers_that_leave_or_change_are_no_others() -> None:
    state = state_with("p0", "d0", "d1", "d2")

    def others(name: str) -> int:
        return state.roles.count_others(CountOthers(name=name, role=WorkerRole.DECODE), state.workers)

    assert (others("d0"), others("p0")) == (2, 3)
    state.roles.drain("d1", state.workers)
    assert others("d0") == 1
    state.roles.assign("d2", WorkerRole.PREFILL, state.workers)
    assert state.roles.answer(next(one.info for one in state.workers if one.info.name == "d2")) == AssignedRole(
        role=WorkerRole.PREFILL, fixed=True
    )
    assert (others("d0"), others("d2")) == (0, 1)


def test_a_move_is_no_attempt_but_workers_can_tell_its_parts_apart() -> None:
    retries = Retries(RetryPolicy())
    retries.begin()
    assert retries.epoch == 1
    retries.moved("d0")
    assert (retries.num_attempts, retries.num_moves, retries.epoch, retries.failed) == (1, 1, 2, {"d0"})
    retries.begin()
    assert retries.epoch == 3
