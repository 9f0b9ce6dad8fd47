"""The forms of admission in the simulated cluster under more requests than it can serve: rejected, wasted, good."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import pytest
from world_cases import cluster

from moonpool.conductor.admission.forms import AdmissionForm
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.sim.physics.paper_fit import mooncake_cost
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.job import DONE, Job
from moonpool.sim.world.results import Results
from moonpool.traces.generate import generate

TTFT_S, TBT_S = 30.0, 0.1
LASTS_S = pytest.mark.parametrize("lasts_s", [120.0, pytest.param(300.0, marks=pytest.mark.soak)])
RATES = (1.5, 2.0, 3.0)  # 4 + 4 nodes can serve a little less than 2 a second
NONE, EARLY, PAPER, PREDICTED = AdmissionForm


class Outcome(NamedTuple):
    rejected: int
    wasted: int
    good_per_s: float  # within both targets, and done while requests still came
    bias: float  # of the predicted number of decoding requests


@cache
def outcome(form: AdmissionForm, rate: float, lasts_s: float) -> Outcome:
    trace = generate("chat", num_requests=int(rate * lasts_s), rate_per_s=rate, seed=1)
    policy = PolicyConfig(name="cost", ttft_slo_s=TTFT_S, tbt_slo_s=TBT_S, admission=form)
    world = SimCluster(cluster(num_prefill=4, num_decode=4, cost=mooncake_cost(), policy=policy), trace)
    jobs = world.run()
    results, last_s = Results.of(jobs), jobs[-1].arrival_s
    (error,) = [each for each in world.conductor.predictions() if each.model == "decode_load"]
    num_good = sum(is_good(job) for job in jobs if job.end_s <= last_s)
    return Outcome(sum(results.refusals.values()), int(results.is_wasted.sum()), num_good / last_s, error.bias)


def is_good(job: Job) -> bool:
    if job.outcome != DONE or job.ttft_s is None or job.tbt_s is None:
        return False
    return job.ttft_s <= TTFT_S and job.tbt_s <= TBT_S


@LASTS_S
def test_each_form_rejects_less_than_the_one_before(lasts_s: float) -> None:
    none, early, predicted = (outcome(form, 3.0, lasts_s).rejected for form in (NONE, EARLY, PREDICTED))
    assert none > early > predicted


@pytest.mark.parametrize(
    ("rate", "lasts_s"),
    [(3.0, 120.0), *(pytest.param(rate, 300.0, marks=pytest.mark.soak) for rate in (3.0, 6.0))],
)
def test_the_forecast_saves_most_of_the_wasted_prefills(rate: float, lasts_s: float) -> None:
    none, early, predicted = (outcome(form, rate, lasts_s).wasted for form in (NONE, EARLY, PREDICTED))
    assert min(none, early) > 4 * predicted


@LASTS_S
def test_the_forecast_sees_all_that_will_be_decoding(lasts_s: float) -> None:
    """At the start answers are expected to be shorter than they are here: that is most of the short run's bias."""
    assert outcome(PREDICTED, 3.0, lasts_s).bias == pytest.approx(0.0, abs=0.12 if lasts_s < 300 else 0.03)


@LASTS_S
def test_the_papers_forecast_leaves_out_long_answers_and_saves_fewer_prefills(lasts_s: float) -> None:
    assert outcome(PAPER, 3.0, lasts_s).bias < -0.1
    assert outcome(PAPER, 3.0, lasts_s).wasted > 4 * outcome(PREDICTED, 3.0, lasts_s).wasted


@LASTS_S
def test_at_twice_the_best_rate_as_much_good_comes_out(lasts_s: float) -> None:
    best = max(RATES, key=lambda rate: outcome(PREDICTED, rate, lasts_s).good_per_s)
    assert outcome(PREDICTED, 2 * best, lasts_s).good_per_s >= 0.9 * outcome(PREDICTED, best, lasts_s).good_per_s
    assert outcome(PREDICTED, best, lasts_s).good_per_s > 1.5, "most of what can be served at all"
