"""When a request ended, and what became of its earlier attempts, in its decision record. On a virtual clock."""

from __future__ import annotations

from typing import Any

import pytest
from worker_info import info

from moonpool.base.errors import Unavailable
from moonpool.conductor.messages import DecisionRecord, PrefillParts, RequestEnded, Route
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.placement.prefix_index import PrefixIndex
from moonpool.conductor.records.store import MAX_EARLIER
from moonpool.conductor.state import ConductorState

WALL_S = 1_700_000_000.0


@pytest.fixture
def state() -> ConductorState:
    state = ConductorState(PolicyConfig(), PrefixIndex(), 100)
    for name in ("p0", "p1", "d0"):
        state.register(info(name))
    return state


def send(state: ConductorState, now_s: float, **fields: Any) -> None:
    call = Route(request_id="r", keys=[], num_tokens=20, max_tokens=8, **fields)
    state.route(call, "fe", now_s, WALL_S + now_s)


def end(state: ConductorState, now_s: float, **fields: Any) -> DecisionRecord:
    state.request_ended(RequestEnded(request_id="r", **fields), now_s)
    return record(state)


def record(state: ConductorState) -> DecisionRecord:
    found = state.records.get("r")
    assert found is not None
    return found


def test_the_end_and_the_parts_of_a_request(state: ConductorState) -> None:
    send(state, 10.0)
    assert record(state).ended_at_s is None
    parts = PrefillParts(queue_s=0.1, pull_s=0.2, compute_s=0.3, handoff_s=0.05, pull_layers_s=(0.1, 0.2))
    found = end(state, 12.5, ssd_tokens=3, remote_tokens=4, parts=parts)
    assert found.ended_at_s == WALL_S + 12.5
    assert (found.ssd_tokens, found.remote_tokens, found.parts) == (3, 4, parts)
    assert found.earlier == ()


def test_every_attempt_is_kept_in_order(state: ConductorState) -> None:
    send(state, 0.0)
    first = record(state)
    end(state, 1.0, outcome="peer_lost", output_tokens=2)
    send(state, 2.0, exclude=(str(first.prefill),))
    send(state, 5.0)  # the end of the second attempt was lost on its way
    found = end(state, 6.0, output_tokens=8)
    assert (found.attempt, found.outcome) == (3, "done")
    one, two = found.earlier
    assert (one.prefill, one.outcome, one.output_tokens) == (first.prefill, "peer_lost", 2)
    assert (one.routed_at_s, one.ended_at_s) == (WALL_S, WALL_S + 1)
    assert (two.outcome, two.routed_at_s, two.ended_at_s) == ("rerouted", WALL_S + 2, WALL_S + 5)
    assert two.prefill != one.prefill


def test_attempts_do_not_grow_without_end(state: ConductorState) -> None:
    for number in range(3 * MAX_EARLIER):
        send(state, float(number))
    found = record(state)
    assert (found.attempt, len(found.earlier)) == (3 * MAX_EARLIER, MAX_EARLIER)
    assert found.earlier[-1].routed_at_s == WALL_S + 3 * MAX_EARLIER - 2, "the newest ones"


def test_refused_and_abandoned_requests_have_an_end() -> None:
    state = ConductorState(PolicyConfig(), PrefixIndex(), 100)
    with pytest.raises(Unavailable):
        send(state, 3.0)
    assert record(state).ended_at_s == WALL_S + 3.0
    for name in ("p0", "d0"):
        state.register(info(name))
    send(state, 4.0)
    assert [each.outcome for each in record(state).earlier] == ["unavailable"]
    assert record(state).earlier[0].reason is not None
    state.owner_gone("fe", 9.0)
    assert (record(state).outcome, record(state).ended_at_s) == ("abandoned", WALL_S + 9.0)
