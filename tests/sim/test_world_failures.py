"""Nodes that crash, come back or are slow while a trace is replayed: every request ends, and the books balance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from world_cases import BLOCK, chat, cluster, trace_of, workers_of

from moonpool.base.errors import InvalidInput
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.conductor.retries import RetryPolicy
from moonpool.sim.physics import hardware
from moonpool.sim.physics.links import Network
from moonpool.sim.physics.paper_fit import paper_cost
from moonpool.sim.world.clock import SimClock
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.config import Failure, Kind, parse_failure
from moonpool.sim.world.job import DONE, LOST, REFUSED, Job
from moonpool.sim.world.results import Results

COST = paper_cost()
KV_NBYTES = 327_680


def world(trace: Any, *failures: str, **changes: Any) -> SimCluster:
    return SimCluster(cluster(failures=tuple(parse_failure(each) for each in failures), **changes), trace)


def check(ended: SimCluster) -> None:
    """Nothing is left anywhere."""
    assert all(job.outcome in (DONE, REFUSED, LOST) for job in ended.jobs)
    assert [job.num_input for job in ended.jobs] == ended.trace.num_input.tolist()
    assert [job.num_output for job in ended.jobs] == ended.trace.num_output.tolist()
    for worker in workers_of(ended):
        worker.scheduler.check_integrity()
        pages = worker.scheduler.pages
        assert not worker.scheduler.queues.sequences
        assert not pages.owned
        assert pages.num_available == pages.num_pages
        assert not worker._jobs
    for pool in set(ended.pools.values()) - {None}:
        pool.state.check_integrity()  # type: ignore[union-attr]
    assert ended.conductor.num_open == 0
    for job in ended.jobs:
        if job.outcome == DONE:
            assert job.ttft_s is not None
            assert job.tbt_s is not None
            assert 0 < job.ttft_s <= job.end_s - job.arrival_s + 1e-9
            assert job.num_output == 1 or job.tbt_s > 0
            assert 0 <= job.reused_tokens < job.num_input


# what people type


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("p3@600+120", Failure(600.0, "p3", 120.0)),
        ("d0@1.5", Failure(1.5, "d0")),
        ("p0@600+120:slow=4", Failure(600.0, "p0", 120.0, "slow", 4.0)),
        ("p0@600+120:frozen", Failure(600.0, "p0", 120.0, "frozen")),
    ],
)
def test_failures_are_read_and_told_alike(text: str, failure: Failure) -> None:
    assert parse_failure(text) == failure
    assert str(failure) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("p3", "'p3' is no failure; write p3@600"),
        ("p3@-1", "is no failure"),
        ("p3@6+0", "cannot fail at 6 s for 0"),
        ("p3@6+1:melts", "is no failure"),
        ("p3@6+1:slow=1", "more than 1 times slower"),
        ("p3@6:frozen", "needs a duration"),
    ],
)
def test_wrong_ones_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        parse_failure(text)


def test_a_schedule_has_to_fit_the_cluster() -> None:
    with pytest.raises(InvalidInput, match="no node 'p7'; there are p0, p1, d0, d1"):
        cluster(failures=(Failure(1.0, "p7"),))
    with pytest.raises(InvalidInput, match="p1 cannot crash at 5 s: it is down since 1 s"):
        cluster(failures=(Failure(5.0, "p1", 2.0), Failure(1.0, "p1", 10.0)))


# by hand


def test_a_prompt_whose_prefill_worker_dies_is_computed_by_another() -> None:
    trace = trace_of((0.0, 8000, 3, list(range(16))))
    (before,) = world(trace).run()
    lost = world(trace, "p0@0.3")
    (job,) = lost.run()
    check(lost)
    assert (job.outcome, job.num_retries) == (DONE, 1)
    # 0.3 s were for nothing, then the front end paused for 0.1 s and began anew at the other.
    assert job.ttft_s == pytest.approx(0.4 + COST.prefill.compute_s(8000))
    assert job.end_s == pytest.approx(0.4 + before.end_s)
    assert [each.info.name for each in lost.conductor.status()] == ["d0", "d1", "p1"]


def test_an_answer_goes_on_where_the_dead_decode_worker_left_it() -> None:
    ttft_s = COST.prefill.compute_s(4000)
    half_s = COST.decode_steps_s(1, 4000, 50)
    crashing = world(trace_of((0.0, 4000, 101, list(range(8)))), f"d0@{ttft_s + half_s + 0.001:.6f}", num_decode=2)
    (job,) = crashing.run()
    check(crashing)
    assert (job.outcome, job.num_retries, job.num_output) == (DONE, 1, 101)
    assert job.ttft_s == pytest.approx(ttft_s)
    # 51 tokens were there; the KV of the answer's is computed anew with what the prompt's last block lacks.
    first_layer_s = 7 * BLOCK * KV_NBYTES / 80 / hardware.node("a800").h2d_bandwidth
    again_s = first_layer_s + COST.prefill.compute_s(4051, 7 * BLOCK)
    rest_s = COST.decode_steps_s(1, 4051, 49)
    assert job.end_s == pytest.approx(ttft_s + half_s + 0.001 + 0.1 + again_s + rest_s, abs=1e-4)
    gaps = sorted([0.101 + again_s, *(COST.decode_step_s(1, 4000 + n) for n in range(50)), *[0.0264] * 49])
    assert job.tbt_s == pytest.approx(sum(gaps[-10:]) / 10, rel=0.01)


def test_what_was_being_pulled_from_a_dead_node_is_computed() -> None:
    """p1 has the prefix; while p0 pulls it, p1 dies."""
    prefix, prompt = list(range(64)), list(range(66))
    trace = trace_of((0.0, 64 * BLOCK + 1, 1, [*prefix, 99]), (100.0, 66 * BLOCK, 1, prompt))
    policy = PolicyConfig(name="round-robin")
    slow = replace(cluster().node, nic_bandwidth=1e9)
    plain = world(trace, policy=policy, always_pulls=True, node=slow)
    jobs = plain.run()
    assert jobs[1].remote_tokens == 64 * BLOCK
    source = next(node for node in ("p0", "p1") if plain.clock.network.nbytes_over_time(f"{node}/nic_out")[1].sum() > 0)
    crashing = world(trace, f"{source}@100.5+10", policy=policy, always_pulls=True, node=slow)
    jobs = crashing.run()
    check(crashing)
    assert (jobs[1].outcome, jobs[1].num_retries, jobs[1].reused_tokens) == (DONE, 0, 0)
    assert jobs[1].ttft_s is not None
    assert jobs[1].ttft_s > 0.5 + COST.prefill.work_s(66 * BLOCK, 0)


def test_blocks_on_a_dead_node_are_gone_for_good_and_elsewhere_they_stay() -> None:
    shared = list(range(40))
    trace = trace_of(*[(100.0 * n, 40 * BLOCK + 1, 2, [*shared, 100 + n]) for n in range(4)])
    policy = PolicyConfig(name="paper")
    whole = world(trace, num_prefill=1, policy=policy)
    assert [job.reused_tokens > 0 for job in whole.run()] == [False, True, True, True]
    crashing = world(trace, "p0@150+20", num_prefill=1, policy=policy)
    assert [job.reused_tokens > 0 for job in crashing.run()] == [False, True, False, True]
    check(crashing)
    held = world(trace, "p0@150+20", num_prefill=1, num_decode=1, policy=policy, decode_nodes_hold_blocks=True)
    held.run()
    check(held)


def test_a_worker_that_is_back_is_another_incarnation() -> None:
    trace = trace_of(*[(float(n), 4000, 20, [n * 10 + k for k in range(8)]) for n in range(40)])
    back = world(trace, "p0@5+3", "d1@12+3", policy=PolicyConfig(name="round-robin"))
    jobs = back.run()
    check(back)
    assert {job.outcome for job in jobs} == {DONE}
    incarnations = {each.info.name: each.info.incarnation for each in back.conductor.status()}
    assert incarnations == {"p0": 2, "p1": 1, "d0": 1, "d1": 2}
    assert next(each for each in back.conductor.status() if each.info.name == "p0").indexed_blocks > 0


def test_with_nobody_left_requests_wait_for_workers_and_are_lost_in_the_end() -> None:
    trace = trace_of(*[(float(n), 4000, 20, [n * 10 + k for k in range(8)]) for n in range(10)])
    gone = world(trace, "p0@2.2", num_prefill=1)
    jobs = gone.run()
    check(gone)
    assert {job.outcome for job in jobs[:2]} == {DONE}
    assert {job.outcome for job in jobs[3:]} == {LOST}
    assert gone.clock.now_s < 9 + 30 + 2
    back = world(trace, "p0@2.2+20", num_prefill=1)
    assert {job.outcome for job in back.run()} == {DONE}, "front ends wait longer than that"
    check(back)


def test_a_request_that_workers_die_of_is_not_tried_for_ever() -> None:
    trace = trace_of((0.0, 60_000, 3, list(range(118))))
    failures = [f"p0@{2 * n + 1}+0.5" for n in range(10)]
    dying = world(trace, *failures, num_prefill=1)
    (job,) = dying.run()
    check(dying)
    assert (job.outcome, job.num_retries) == (LOST, RetryPolicy().max_deaths)
    summary = Results.of([job]).summary()
    assert (summary["num_lost"], summary["num_retries"], summary["num_done"]) == (1, 2, 0)


def test_a_slow_network_makes_hand_offs_late_while_it_is_slow() -> None:
    trace = trace_of(*[(20.0 * n, 8000, 2, [n * 100 + k for k in range(16)]) for n in range(3)])
    how: dict[str, Any] = {"num_prefill": 1, "num_decode": 1}
    waits = {}
    for name, failures in (("plain", ()), ("slow", ("d0@15+20:slow=200",)), ("frozen", ("d0@15+20:frozen",))):
        ran = world(trace, *failures, **how)
        waits[name] = [job.end_s - job.arrival_s for job in ran.run()]
        check(ran)
    assert waits["slow"][::2] == pytest.approx(waits["plain"][::2])
    send_s = 8000 * KV_NBYTES / (cluster().node.network_bandwidth / 200)
    assert waits["slow"][1] == pytest.approx(send_s + COST.decode_step_s(1, 8000), rel=1e-3)
    assert waits["frozen"][1] == pytest.approx(15.0, rel=0.1), "until 35 s"


def test_a_slow_network_of_a_node_that_crashes_stays_slow() -> None:
    both = world(chat(60, seed=5), "d0@2+20:slow=50", "d0@5+5", "p1@3+4:frozen", "p1@4+10")
    both.run()
    check(both)
    for link in ("d0/nic_in", "p1/nic_out"):
        slowed = both.clock.network._links[link]
        assert slowed.capacity == slowed.nominal


def test_over_cut_links_nothing_arrives() -> None:
    clock = SimClock(Network({"a": 10.0, "b": 10.0}))
    told: list[str] = []
    clock.send(("a", "b"), 100.0, lambda: told.append("came"), lambda: told.append("lost"))
    clock.call_at(1.0, lambda: clock.fail_links(["a"]))
    clock.call_at(
        2.0, lambda: clock.send(("a",), 5.0, lambda: told.append("came"), lambda: told.append("lost at once"))
    )
    clock.call_at(3.0, lambda: clock.restore_links(["a"]))
    clock.call_at(4.0, lambda: clock.send(("a",), 5.0, lambda: told.append("came at last")))
    clock.run()
    assert told == ["lost", "lost at once", "came at last"]


# whatever happens


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Failure, ...]:
    found: list[Failure] = []
    for node in ("p0", "p1", "p2", "p3", "d0", "d1"):
        at_s = 0.0
        for _ in range(draw(st.integers(0, 2))):
            at_s += draw(st.floats(0.01, 12.0))
            lasts_s = draw(st.sampled_from([0.05, 1.0, 5.0, 40.0, None]))
            found.append(Failure(at_s, node, lasts_s))
            if lasts_s is None:
                break
            at_s += lasts_s
        if draw(st.booleans()):
            kind: Kind = draw(st.sampled_from(["slow", "frozen"]))
            found.append(Failure(draw(st.floats(0.0, 20.0)), node, draw(st.floats(0.1, 10.0)), kind, 20.0))
    return tuple(found)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    failures=schedules(),
    seed=st.integers(0, 1000),
    pool=st.sampled_from(["shared", "local", "none"]),
    pipeline_nodes=st.sampled_from([1, 1, 2]),
    has_targets=st.booleans(),
    layer_wise=st.booleans(),
    memory=st.sampled_from(["plenty", "little", "disks"]),
)
def test_every_request_ends_whatever_fails(
    failures: tuple[Failure, ...],
    seed: int,
    pool: str,
    pipeline_nodes: int,
    has_targets: bool,
    layer_wise: bool,
    memory: str,
) -> None:
    node = cluster().node
    if memory != "plenty":
        node = replace(node, dram_nbytes=60 * BLOCK * KV_NBYTES, gpu=replace(node.gpu, hbm_nbytes=26e9))
    if memory == "disks":
        node = replace(node, ssd_nbytes=1e12)
    targets: dict[str, Any] = {"ttft_slo_s": 6.0, "tbt_slo_s": 0.05} if has_targets else {}
    config = cluster(
        num_prefill=4,
        failures=failures,
        pool=pool,
        pipeline_nodes=pipeline_nodes,
        layer_wise=layer_wise,
        node=node,
        policy=PolicyConfig(name="cost", **targets),
        decode_nodes_hold_blocks=seed % 2 == 0,
    )
    trace = chat(50, seed, rate=4.0)
    first, second = SimCluster(config, trace), SimCluster(config, trace)
    first.run()
    check(first)
    second.run()
    assert [_facts(job) for job in first.jobs] == [_facts(job) for job in second.jobs], "same seed, same bytes"


def _facts(job: Job) -> tuple[Any, ...]:
    return (job.outcome, job.reason, job.ttft_s, job.tbt_s, job.end_s, job.compute_s, job.num_retries)


def test_a_failure_that_comes_too_late_changes_nothing() -> None:
    trace = chat(60, seed=8)
    plain, late = world(trace), world(trace, "p0@5000+1", "d1@6000")
    assert [_facts(job) for job in plain.run()] == [_facts(job) for job in late.run()]
