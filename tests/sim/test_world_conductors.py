"""Several simulated conductors with the same workers: they learn of each other's requests by reports alone, and predict
and refuse as one conductor does."""

from __future__ import annotations

import random
from functools import cache
from typing import Any, NamedTuple

import pytest
from world_cases import BLOCK, chat, cluster, trace_of, workers_of

from moonpool.base.errors import ConfigError
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.sim.physics.paper_fit import mooncake_cost
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.config import REPORT_EVERY_S, parse_failure
from moonpool.sim.world.job import DONE, LOST, REFUSED
from moonpool.sim.world.results import Results
from moonpool.traces.columns import Trace

SEVERAL = (2, 3)


def questions(number: int, rate: float, answer: int, seed: int = 1) -> Trace:
    """Questions about ten documents: prompts of 16 blocks, of which 15 are cached after the first question."""
    draw, now_s, requests = random.Random(seed), 0.0, []
    for question in range(number):
        now_s += draw.expovariate(rate)
        document = draw.randrange(10)
        ids = [document * 100 + block for block in range(15)] + [100_000 + question]
        num_tokens = 16 * BLOCK - draw.randint(0, BLOCK - 1)
        requests.append((now_s, num_tokens, max(2, int(draw.lognormvariate(0, 0.6) * answer)), ids))
    return trace_of(*requests)


def world_of(trace: Trace, conductors: int, **changes: Any) -> SimCluster:
    several = {"num_conductors": conductors, "report_every_s": REPORT_EVERY_S, "cost": mooncake_cost()}
    return SimCluster(cluster(**{**several, **changes}), trace)


class Shares(NamedTuple):
    refused: float
    wasted: float
    reused: float


@cache
def shares(limit: str, conductors: int) -> Shares:
    """Run a little more than the workers can do; with the limit "ttft" some requests wait in the conductors."""
    is_tbt = limit == "tbt"
    policy = PolicyConfig(tbt_slo_s=0.08) if is_tbt else PolicyConfig(ttft_slo_s=2.0)
    trace = questions(500, 2.5, 130) if is_tbt else questions(400, 10.5, 10)
    found = Results.of(world_of(trace, conductors, policy=policy).run())
    return Shares(
        sum(found.refusals.values()) / len(found), float(found.is_wasted.mean()), found.summary()["hit_share"]
    )


@pytest.mark.parametrize("conductors", SEVERAL)
@pytest.mark.parametrize("limit", ["tbt", "ttft"])
def test_several_conductors_refuse_as_many_as_one_and_waste_no_prefills(limit: str, conductors: int) -> None:
    one, several = shares(limit, 1), shares(limit, conductors)
    assert one.refused > 0.03, "there is something to refuse"
    assert abs(several.refused - one.refused) < 0.02
    assert several.wasted <= 0.02
    assert several.reused > 0.9


@pytest.mark.parametrize("failures", [(), ("p0@40+30", "d1@60+20")])
def test_every_request_ends_once_and_each_conductor_forgets_it(failures: tuple[str, ...]) -> None:
    world = world_of(
        chat(120, seed=3),
        3,
        policy=PolicyConfig(ttft_slo_s=30.0, tbt_slo_s=0.1),
        failures=tuple(parse_failure(each) for each in failures),
    )
    jobs = world.run()
    assert {job.outcome for job in jobs} <= {DONE, REFUSED, LOST}
    assert sum(job.outcome == DONE for job in jobs) > 80
    for worker in workers_of(world):
        worker.scheduler.check_integrity()
    for reporter in world._components.reporters.values():
        reporter.report(world.clock.now_s)
    for conductor in world.conductors:
        assert conductor.num_open == 0
        assert conductor.counters["routed"] > 10
        assert conductor._admission._forecast.over_by_s(0.0) > 0
        assert conductor._admission._forecast._open == {}  # type: ignore[attr-defined]
        for known in conductor.workers:
            assert (known.others.prompts, known.others.answers, known.backlog.num_requests) == ({}, {}, 0)
            assert known.backlog.wait_s(world.clock.now_s) == 0.0


def test_a_crashed_worker_does_not_report_on() -> None:
    world = world_of(chat(10, seed=1), 2)
    old = world._components.reporters["d0"]
    old.request_came()
    world._components.unregister("d0")
    world._components.restart("d0")
    world._components.register("d0")
    assert world._components.reporters["d0"] is not old
    old.request_came()
    assert len(world.run()) == 10


def test_what_is_not_simulated_is_refused() -> None:
    with pytest.raises(ConfigError, match="several conductors"):
        cluster(num_conductors=2, pipeline=2)
