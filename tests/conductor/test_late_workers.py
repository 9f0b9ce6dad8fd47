"""Workers whose engine or reports do not go on: they get no requests while others of their role do."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_info import info

from moonpool.base.cluster import ReportWorker, WorkerLoad
from moonpool.base.errors import Unavailable
from moonpool.conductor.messages import Decision, Route
from moonpool.conductor.placement.policy import POLICY_NAMES, PolicyConfig
from moonpool.conductor.placement.prefix_index import PrefixIndex
from moonpool.conductor.registration import LOOK_S
from moonpool.conductor.state import ConductorState

KEYS = [bytes([number]) * 32 for number in range(4)]
EVERY_S = 1.0  # reports of these workers
NUM_LOOKS = math.floor(3 * EVERY_S / LOOK_S)  # without a report that are no reason


def state_with(*names: str, policy: str = "cost") -> ConductorState:
    state = ConductorState(PolicyConfig(name=policy), PrefixIndex(), 100)
    for name in names:
        state.register(info(name, report_every_s=EVERY_S))
    return state


def report(state: ConductorState, name: str, sequence: int, **fields: Any) -> None:
    load = WorkerLoad(free_pages=1000)
    state.report(ReportWorker(name=name, incarnation=1, sequence=sequence, load=load, **fields))


def overdue(state: ConductorState, name: str, sequence: int = 1, **fields: Any) -> None:
    report(state, name, sequence, step_s=4.0, step_due_s=3.0, **fields)


def route(state: ConductorState, number: int, **fields: Any) -> Decision:
    call = Route(request_id=f"r{number}", keys=KEYS, num_tokens=4 * 64 + 5, max_tokens=16, **fields)
    return state.route(call, "fe", 0.0, 0.0)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_an_overdue_worker_gets_nothing_until_it_goes_on(policy: str) -> None:
    state = state_with("p0", "p1", "d0", "d1", policy=policy)
    overdue(state, "p0", cached=tuple(KEYS))  # the best place otherwise
    overdue(state, "d1")
    found = [route(state, number) for number in range(8)]
    assert {(each.prefill.name, each.decode.name) for each in found} == {("p1", "d0")}
    assert [one.info.name for one in state.status() if one.is_late] == ["d1", "p0"]
    report(state, "p0", 2)
    report(state, "d1", 2)
    found = [route(state, number) for number in range(8, 32)]
    assert {each.prefill.name for each in found} >= {"p0"}
    assert {each.decode.name for each in found} == {"d0", "d1"}
    assert (state.counters["late"], state.late) == (2, frozenset())


def test_if_all_are_late_requests_go_on_coming_to_them() -> None:
    state = state_with("p0", "p1", "d0")
    overdue(state, "p0")
    assert route(state, 1).prefill.name == "p1"
    assert not state.has_room(0.0, 0.0), "p0 has no backlog, and counts for nothing"
    overdue(state, "p1")
    overdue(state, "d0")
    assert {route(state, number).prefill.name for number in range(2, 6)} == {"p0", "p1"}


def test_a_worker_that_failed_a_request_is_not_its_way_out() -> None:
    state = state_with("p0", "p1", "d0")
    overdue(state, "p0")
    with pytest.raises(Unavailable, match="no prefill worker"):
        route(state, 1, exclude=("p1",))  # the front end then asks again without exceptions
    assert route(state, 1).prefill.name == "p1"


def test_a_worker_that_is_gone_is_no_longer_late() -> None:
    state = state_with("p0", "p1", "d0")
    overdue(state, "p0")
    (worker,) = [one for one in state.workers if one.info.name == "p0"]
    state.unregister(worker)
    assert (state.late, state.counters["lost_late"]) == (frozenset(), 1)
    state.register(info("p2"))  # takes its row
    assert {route(state, number).prefill.name for number in range(4)} == {"p1", "p2"}


@given(st.lists(st.sampled_from(["look", "report", "overdue"]), max_size=60))
def test_late_is_who_was_overdue_last_or_does_not_report(steps: list[str]) -> None:
    state, sequence, num_looks, num_all_looks, is_overdue = state_with("p0", "p1", "d0"), 0, 0, 0, False
    for step in steps:
        if step == "look":
            state.look()
            num_looks, num_all_looks = num_looks + 1, num_all_looks + 1
        else:
            sequence, num_looks, is_overdue = sequence + 1, 0, step == "overdue"
            (overdue if is_overdue else report)(state, "p0", sequence)
        expected = {"p0"} if is_overdue or num_looks > NUM_LOOKS else set()
        expected |= {"p1", "d0"} if num_all_looks > NUM_LOOKS else set()
        assert state.late == expected
    late = state.late & {"p0", "p1"}
    chosen = {route(state, number).prefill.name for number in range(8)}
    assert chosen == ({"p0", "p1"} - late or {"p0", "p1"})
