"""The elastic rule: when a worker moves, and when none does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.cluster import WorkerInfo, WorkerLoad, WorkerRole
from moonpool.base.errors import InvalidInput, NotFound
from moonpool.conductor.admission.forms import AdmissionConfig
from moonpool.conductor.demand import UnmetDemand
from moonpool.conductor.elastic import HOLD_S, REST_S, ClusterLoad, ElasticRule
from moonpool.conductor.messages import WorkerRef
from moonpool.conductor.registration import Registration
from moonpool.conductor.roles import RoleAssignments

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
QUIET = ClusterLoad(num_prefill=2, num_decode=2, max_num_seqs=8, num_pages=100)
LONG_PROMPTS = replace(QUIET, work_s=8.0, num_seqs=1)
LONG_ANSWERS = replace(QUIET, num_seqs=16, kv_tokens=1600, used_pages=120)


def step_s(num_seqs: float, kv_tokens: float) -> float:
    return 0.01 + 0.01 * num_seqs


def make_rule() -> ElasticRule:
    return ElasticRule(AdmissionConfig(ttft_slo_s=2.0, tbt_slo_s=0.1), step_s)


def moves(rule: ElasticRule, load: ClusterLoad, start_s: float, seconds: float) -> list[WorkerRole]:
    """What the rule says while this load lasts, looked at twice a second."""
    found = [rule.decide(load, start_s + 0.5 * look) for look in range(int(2 * seconds) + 1)]
    return [role for role in found if role is not None]


@pytest.mark.parametrize(("load", "role"), [(LONG_PROMPTS, PREFILL), (LONG_ANSWERS, DECODE)])
def test_the_busier_role_gains_a_worker(load: ClusterLoad, role: WorkerRole) -> None:
    assert moves(make_rule(), load, 0.0, HOLD_S) == [role]


def test_nothing_moves_before_the_load_has_lasted() -> None:
    rule = make_rule()
    for turn in range(20):  # a load that swings faster than roles can follow
        load = LONG_PROMPTS if turn % 2 else LONG_ANSWERS
        assert moves(rule, load, turn * HOLD_S, HOLD_S - 0.6) == []


def test_moves_are_some_time_apart() -> None:
    rule = make_rule()
    three = replace(LONG_PROMPTS, num_decode=6)
    assert moves(rule, three, 0.0, HOLD_S) == [PREFILL]
    assert moves(rule, three, HOLD_S + 0.5, REST_S - 1.0) == []
    assert moves(rule, three, HOLD_S + REST_S, HOLD_S) == [PREFILL]


@pytest.mark.parametrize(
    "load",
    [
        QUIET,
        replace(QUIET, work_s=1.0, num_seqs=4),  # both within their targets
        replace(LONG_PROMPTS, num_decode=1),  # the last of its role
        replace(LONG_PROMPTS, num_seqs=16),  # as busy as the other: the one left would be worse off
        replace(LONG_PROMPTS, num_prefill=0),
    ],
)
def test_what_moves_nothing(load: ClusterLoad) -> None:
    assert moves(make_rule(), load, 0.0, 20.0) == []


def test_without_targets_places_and_pages_count() -> None:
    rule = ElasticRule(AdmissionConfig(), step_s)
    assert rule.pressure(replace(QUIET, num_seqs=8), DECODE, 2) == 0.5
    assert rule.pressure(replace(QUIET, num_seqs=8, used_pages=180), DECODE, 2) == 0.9


@pytest.mark.parametrize(
    ("load", "prefill", "decode"),
    [(QUIET, 1, 1), (LONG_PROMPTS, 6, 1), (LONG_ANSWERS, 1, 3), (replace(QUIET, work_s=999.0), 8, 1)],
)
def test_wanted_workers_are_as_many_as_bring_the_pressure_down(load: ClusterLoad, prefill: int, decode: int) -> None:
    rule = make_rule()
    assert (rule.wanted(load, PREFILL), rule.wanted(load, DECODE)) == (prefill, decode)


loads = st.builds(
    ClusterLoad,
    num_prefill=st.integers(1, 6),
    num_decode=st.integers(1, 6),
    work_s=st.floats(0, 100),
    num_seqs=st.integers(0, 200),
    kv_tokens=st.integers(0, 10**6),
    used_pages=st.integers(0, 1000),
    max_num_seqs=st.just(32),
    num_pages=st.just(200),
)


@given(loads)
def test_a_move_lowers_the_higher_pressure_and_is_never_taken_back_under_the_same_load(load: ClusterLoad) -> None:
    rule = make_rule()
    found = moves(rule, load, 0.0, HOLD_S)
    if not found:
        return
    sign = 1 if found == [PREFILL] else -1
    after = replace(load, num_prefill=load.num_prefill + sign, num_decode=load.num_decode - sign)

    def worst(one: ClusterLoad) -> float:
        return max(rule.pressure(one, PREFILL, one.num_prefill), rule.pressure(one, DECODE, one.num_decode))

    assert min(after.num_prefill, after.num_decode) >= 1
    assert worst(after) <= 0.8 * worst(load) + 1e-9
    assert found[0] not in {DECODE if role is PREFILL else PREFILL for role in moves(rule, after, 100.0, 60.0)}


def registered(name: str, role: WorkerRole, *, fixed: bool = False, work_s: float = 0.0) -> Registration:
    info = WorkerInfo(
        name=name, role=role, address="", incarnation=1, identity=b"", model="m", block_tokens=4, num_pages=100,
        max_num_seqs=8, page_nbytes=1, fixed=fixed,
    )  # fmt: skip
    worker = Registration(info, WorkerLoad(free_pages=100), 0, WorkerRef(name, "", 1))
    if work_s:
        worker.backlog.add("r", work_s, 0.0)
    return worker


def look(assignments: RoleAssignments, workers: list[Registration]) -> list[str]:
    """Look twice, `HOLD_S` apart; return who is asked to change."""
    for now_s in (0.0, HOLD_S):
        assignments.rebalance(workers, now_s)
    return [worker.info.name for worker in workers if assignments.answer(worker.info)]


def test_the_rule_moves_a_worker_that_may_move_and_one_at_a_time() -> None:
    workers = [registered("p", PREFILL, work_s=9.0), registered("d0", DECODE, fixed=True), registered("d1", DECODE)]
    assignments = RoleAssignments(make_rule(), UnmetDemand(2.0))
    assert look(assignments, workers) == ["d1"]
    assignments.rebalance(workers, 100.0)
    assert assignments.num_moved == 1, "it has not moved yet"


def test_fixed_workers_stay() -> None:
    workers = [registered("p", PREFILL, fixed=True, work_s=9.0)]
    workers += [registered(f"d{number}", DECODE, fixed=True) for number in range(2)]
    assert look(RoleAssignments(make_rule(), UnmetDemand(2.0)), workers) == []


def test_a_worker_that_starts_again_gets_its_role_again() -> None:
    workers = [registered(name, PREFILL, fixed=True) for name in ("a", "b")]
    assignments = RoleAssignments(make_rule(), UnmetDemand(2.0))
    assignments.assign("a", DECODE, workers)
    assigned = assignments.answer(workers[0].info)
    assert assigned is not None
    assert (assigned.role, assigned.fixed) == (DECODE, True)
    moved = registered("a", DECODE, fixed=True).info
    assert assignments.answer(moved) is None
    assert assignments.answer(workers[0].info) == assigned


def test_the_last_worker_of_a_role_keeps_it() -> None:
    workers = [registered("a", PREFILL), registered("b", PREFILL), registered("c", DECODE)]
    assignments = RoleAssignments(make_rule(), UnmetDemand(2.0))
    assignments.assign("a", DECODE, workers)
    with pytest.raises(InvalidInput, match="b is the only prefill worker"):
        assignments.assign("b", DECODE, workers)
    with pytest.raises(NotFound, match="a, b, c"):
        assignments.assign("d", DECODE, workers)
