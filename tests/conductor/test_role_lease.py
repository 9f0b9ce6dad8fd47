"""Which conductor may change workers: the lease that the master gives, and what is done without it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_info import info

from moonpool.base.cluster import AssignedRole, WorkerInfo, WorkerLeft, WorkerRole
from moonpool.base.errors import InvalidInput, NotFound, Unavailable
from moonpool.conductor.admission.forms import AdmissionConfig
from moonpool.conductor.demand import UnmetDemand
from moonpool.conductor.elastic import ClusterLoad, ElasticRule
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.placement.prefix_index import PrefixIndex
from moonpool.conductor.roles import RoleAssignments
from moonpool.conductor.state import ConductorState
from moonpool.master.state.role_leases import MAX_TTL_S, RoleLeases
from moonpool.master.state.space import Generations

D = WorkerRole.DECODE


# the master's side


def test_one_holder_at_a_time_and_rising_numbers() -> None:
    leases = RoleLeases(Generations(1))
    first = leases.acquire("roles", "a", 3.0, 0.0)
    assert first > 0
    assert leases.acquire("roles", "b", 3.0, 2.9) == 0
    assert leases.acquire("roles", "a", 3.0, 2.9) == first, "renewed"
    assert leases.acquire("roles", "b", 3.0, 5.8) == 0
    second = leases.acquire("roles", "b", 3.0, 5.9)
    assert second > first
    assert leases.acquire("roles", "a", 3.0, 6.0) == 0
    assert leases.acquire("other", "a", 3.0, 6.0) > second, "numbers of other rights rise too"
    assert RoleLeases(Generations(2)).acquire("roles", "c", 3.0, 0.0) > second, "a restarted master"


def test_a_lease_is_short_and_has_a_holder() -> None:
    for holder, ttl_s in (("", 1.0), ("a", 0.0), ("a", MAX_TTL_S + 1)):
        with pytest.raises(InvalidInput):
            RoleLeases(Generations(1)).acquire("roles", holder, ttl_s, 0.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 4.0)), max_size=40))
def test_leases_never_overlap(steps: list[tuple[str, float]]) -> None:
    leases, now_s, last = RoleLeases(Generations(1)), 0.0, 0
    held: dict[str, float] = {}  # until when each holder believes that it has the right
    for holder, pause_s in steps:
        now_s += pause_s
        number = leases.acquire("roles", holder, 3.0, now_s)
        others = [name for name, until_s in held.items() if name != holder and until_s > now_s]
        assert bool(number) is not bool(others)
        if number:
            assert number >= last
            held[holder], last = now_s + 3.0, number


# the conductor's side


def make_state(lease: int | None) -> ConductorState:
    state = ConductorState(PolicyConfig(), PrefixIndex(), 10)
    state.roles.lease = lambda: lease
    return state


def register(state: ConductorState, *workers: WorkerInfo) -> None:
    for each in workers:
        state.register(each)
        state.roles.worker_came(each)


def infos(**fields: int) -> list[WorkerInfo]:
    return [info("p0"), info("p1", **fields), info("d0")]


def test_without_the_lease_nothing_is_changed() -> None:
    state = make_state(None)
    register(state, *infos())
    with pytest.raises(Unavailable, match="another one has the right"):
        state.roles.assign("p1", D, state.workers)
    with pytest.raises(Unavailable):
        state.roles.drain("p1", state.workers)
    assert [state.roles.answer(worker.info) for worker in state.workers] == [None] * 3


def test_a_holder_that_lost_the_lease_is_quiet_and_the_next_one_goes_on() -> None:
    old, new = make_state(5), make_state(None)
    for state in (old, new):
        register(state, *infos())
    old.roles.assign("p1", D, old.workers)
    assert old.roles.answer(infos()[1]) == AssignedRole(role=D, fixed=True, lease=5)
    old.roles.lease = lambda: None
    assert old.roles.answer(infos()[1]) is None
    moved = info("p1", role=D, lease=5)  # it had got the answer, and registers with both
    register(new, moved)
    new.roles.lease = lambda: 9
    restarted = info("p1")
    assert new.roles.answer(restarted) == AssignedRole(role=D, fixed=True, lease=9), "it gets its role again"


def test_a_drained_worker_leaves_once() -> None:
    state = make_state(3)
    register(state, *infos(incarnation=1))
    with pytest.raises(InvalidInput, match="d0 is the only decode worker"):
        state.roles.drain("d0", state.workers)
    with pytest.raises(NotFound, match="did you mean 'p1'"):
        state.roles.drain("p11", state.workers)
    state.roles.drain("p1", state.workers)
    with pytest.raises(InvalidInput, match="p0 is the only prefill worker"):
        state.roles.drain("p0", state.workers)
    state.roles.drain("p1", [one for one in state.workers if one.info.name != "p0"])  # said again after p0 has died
    answer = state.roles.answer(infos(incarnation=1)[1])
    assert answer is not None
    assert answer.leaves
    assert state.roles.answer(infos(incarnation=2)[1]) is None, "another process of that name"
    state.roles.worker_left(WorkerLeft(name="p1", incarnation=1), [])
    assert state.roles.left == {"p1"}
    register(state, *infos(incarnation=2))
    assert state.roles.left == set()


def test_a_worker_says_itself_that_it_leaves() -> None:
    state = make_state(7)
    register(state, *infos())
    leaver = info("p1", leaves=True, lease=5)
    state.roles.worker_leaves(leaver)
    assert state.roles.leaving == {"p1": leaver}
    state.roles.leaver_gone(info("p1", leaves=True, lease=5))
    assert state.roles.leaving, "an earlier connection of the same worker has ended"
    state.roles.worker_left(WorkerLeft(name="p1", incarnation=leaver.incarnation), ())
    state.roles.leaver_gone(leaver)
    assert (state.roles.leaving, state.roles.left) == ({}, {"p1"})
    register(state, info("p1", incarnation=2))
    assert not state.roles.left, "it was started again"


def test_a_worker_killed_while_it_leaves_is_not_missed() -> None:
    state = make_state(7)
    register(state, *infos())
    leaver = info("p1", leaves=True, lease=5)
    state.roles.worker_leaves(leaver)
    state.roles.leaver_gone(leaver)
    assert (state.roles.leaving, state.roles.left) == ({}, {"p1"})
    state.roles.worker_lost(info("p0", incarnation=1))
    assert state.roles.left == {"p1"}, "p0 was not told to leave"


def test_a_worker_killed_before_it_leaves_is_not_missed() -> None:
    state = make_state(3)
    register(state, *infos(incarnation=1))
    state.roles.drain("p1", state.workers)
    state.roles.worker_lost(info("p1", incarnation=1))
    assert state.roles.left == {"p1"}
    register(state, info("p1", incarnation=2))
    assert state.roles.left == set(), "it was started again"


def test_the_rule_is_only_for_the_holder() -> None:
    rule = ElasticRule(AdmissionConfig(), lambda num_seqs, kv_tokens: 0.0)
    roles = RoleAssignments(rule, UnmetDemand(2.0))
    roles.lease = lambda: None
    roles.rebalance([], 0.0)
    assert roles.num_moved == 0


def test_slack_is_the_target_less_the_prediction() -> None:
    load = ClusterLoad(num_prefill=2, num_decode=1, work_s=1.0, num_seqs=4, kv_tokens=100)
    rule = ElasticRule(AdmissionConfig(ttft_slo_s=2.0, tbt_slo_s=0.1), lambda num_seqs, kv_tokens: 0.03 * num_seqs)
    assert rule.slack_s(load, WorkerRole.PREFILL, 2) == 1.5
    assert rule.slack_s(load, D, 1) == pytest.approx(-0.02)
    assert ElasticRule(AdmissionConfig(), lambda *_: 0.0).slack_s(load, D, 1) is None
