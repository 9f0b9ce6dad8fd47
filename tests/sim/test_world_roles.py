"""Nodes that change their roles in the simulated cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world_cases import BLOCK, chat, cluster, trace_of, workers_of

from moonpool.base.cluster import WorkerRole
from moonpool.base.errors import ConfigError, InvalidInput
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.config import RoleChange, parse_role_change
from moonpool.sim.world.job import DONE
from moonpool.traces.columns import Trace

TARGETS = PolicyConfig(ttft_slo_s=10.0, tbt_slo_s=0.1)


def run(trace: Trace, *changes: str, **settings: Any) -> SimCluster:
    world = SimCluster(cluster(role_changes=tuple(map(parse_role_change, changes)), **settings), trace)
    world.run()
    check(world)
    return world


def check(world: SimCluster) -> None:
    """Every request has ended, and no worker holds anything for one."""
    assert len(world.jobs) == len(world.trace)
    assert all(job.outcome for job in world.jobs)
    assert not world.conductor.num_open
    for worker in workers_of(world):
        assert not worker.scheduler.queues.sequences
        worker.scheduler.pages.check_integrity()
        assert not worker.scheduler.pages.num_used


def test_a_node_gets_requests_of_its_new_role_only() -> None:
    world = run(chat(120, 1), "p1@20:decode", num_prefill=2, num_decode=2)
    assert world.roles.num_changes == 1
    assert world.conductor.status()[3].info.name == "p1"
    assert world.conductor.status()[3].info.role is WorkerRole.DECODE
    before = [job for job in world.jobs if job.arrival_s < 19]
    after = [job for job in world.jobs if job.arrival_s > 22]
    assert world.decodes["p1"].busy_until_s(world.clock.now_s) > 0
    assert "p1" not in {job.decode for job in before}
    assert "p1" in {job.decode for job in after}
    assert all(job.outcome == DONE for job in world.jobs)


def test_a_node_ends_what_it_has_begun_in_its_old_role() -> None:
    """An answer of 400 tokens goes on where it was; prompts that come meanwhile share the node's steps with it."""
    long_answer = (0.0, BLOCK, 400, [0])
    prompts = [(3.0 + number, 8 * BLOCK, 1, list(range(8 * number + 1, 8 * number + 9))) for number in range(4)]
    still = run(trace_of(long_answer, *prompts), num_prefill=1, num_decode=2, elastic=False)
    decode = still.jobs[0].decode
    moved = run(trace_of(long_answer, *prompts), f"{decode}@2:prefill", "p0@2.6:decode", num_prefill=1, num_decode=2)
    assert moved.jobs[0].decode == decode
    assert moved.jobs[0].outcome == DONE
    assert not moved.roles.refused
    answer, undisturbed = moved.jobs[0], still.jobs[0]
    shared_s = moved.prefills[decode].busy_s
    assert shared_s > 0
    assert answer.end_s - undisturbed.end_s == pytest.approx(shared_s, rel=0.05), "the answer waited for those steps"


def test_the_last_worker_of_a_role_keeps_it() -> None:
    world = run(chat(20, 2), "p0@1:decode", num_prefill=1, num_decode=2)
    assert world.roles.num_changes == 0
    [(change, reason)] = world.roles.refused
    assert change.node == "p0"
    assert "only prefill worker" in reason


def test_a_steady_load_changes_nothing() -> None:
    world = run(chat(200, 3, rate=1.0), elastic=True, policy=TARGETS)
    assert world.roles.num_changes == 0
    fixed = SimCluster(cluster(policy=TARGETS, decode_nodes_hold_blocks=True), chat(200, 3, rate=1.0))
    fixed.run()
    assert [job.end_s for job in world.jobs] == pytest.approx([job.end_s for job in fixed.jobs], rel=1e-3)


@settings(max_examples=25, deadline=None)
@given(
    changes=st.lists(
        st.builds(
            RoleChange,
            at_s=st.floats(0.0, 30.0),
            node=st.sampled_from(["p0", "p1", "p2", "d0", "d1"]),
            role=st.sampled_from(list(WorkerRole)),
        ),
        max_size=12,
    ),
    seed=st.integers(0, 1000),
    elastic=st.booleans(),
    answers_between_steps=st.booleans(),
    has_little_memory=st.booleans(),
)
def test_every_request_ends_whatever_changes(
    changes: list[RoleChange], seed: int, elastic: bool, answers_between_steps: bool, has_little_memory: bool
) -> None:
    node = cluster().node
    if has_little_memory:
        node = replace(node, gpu=replace(node.gpu, hbm_nbytes=26e9))
    config = cluster(
        num_prefill=3,
        node=node,
        elastic=elastic,
        role_changes=tuple(sorted(changes, key=lambda change: change.at_s)),
        answers_between_steps=answers_between_steps,
    )
    trace = chat(60, seed, rate=4.0)
    first, second = SimCluster(config, trace), SimCluster(config, trace)
    first.run()
    check(first)
    second.run()
    assert [(job.ttft_s, job.end_s) for job in first.jobs] == [(job.ttft_s, job.end_s) for job in second.jobs]


@pytest.mark.parametrize("text", ["p0", "p0@3", "p0@3:both", "@3:decode", "p0@-1:decode"])
def test_a_change_is_written_in_one_form(text: str) -> None:
    with pytest.raises(InvalidInput, match="p1@600:decode"):
        parse_role_change(text)


def test_what_cannot_be_combined_is_refused() -> None:
    with pytest.raises(InvalidInput, match="p9"):
        cluster(role_changes=(parse_role_change("p9@1:decode"),))
    with pytest.raises(ConfigError, match="roles"):
        cluster(elastic=True, pipeline_nodes=2)
    with pytest.raises(ConfigError, match="roles"):
        cluster(elastic=True, pool="local")
