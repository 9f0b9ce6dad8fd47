"""Cost models: they find the true curve, never go negative or down, and one bad sample does not ruin them."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.cluster import DecodeSample, PrefillSample, PullSample
from moonpool.conductor.costs import CostModels, nonnegative_minimum


def paper_prefill_s(num_tokens: int, prefix: int) -> float:
    """paper.md D: LLaMA3-70B on 8xA800."""
    n, p = num_tokens / 1024, prefix / 1024
    return 0.068 + 0.1123 * (n - p) + 7.79e-4 * (n * n - p * p) + 2.63e-3 * p


def taught(seed: int, count: int, noise: float = 0.05) -> CostModels:
    costs, rng = CostModels(), random.Random(seed)
    for _ in range(count):
        tokens = int(2 ** rng.uniform(6, 17))
        prefix = rng.choice([0, 0, int(tokens * rng.random())])
        seconds = paper_prefill_s(tokens, prefix) * rng.lognormvariate(0, noise)
        costs.learn(prefills=[PrefillSample(tokens, prefix, seconds)])
    return costs


@pytest.mark.parametrize("seed", range(3))
def test_finds_the_papers_curve(seed: int) -> None:
    costs = taught(seed, 200)
    for tokens in (512, 4096, 16384, 65536, 131072):
        for prefix in (0, tokens // 2, tokens * 9 // 10):
            assert costs.prefill_s(tokens, prefix) == pytest.approx(paper_prefill_s(tokens, prefix), rel=0.15)


def test_one_sample_calibrates_the_scale() -> None:
    costs = CostModels()
    costs.learn(prefills=[PrefillSample(1000, 0, 50.0)])
    assert costs.prefill_s(1000, 0) == pytest.approx(50.0, rel=0.05)
    assert 70 < costs.prefill_s(2000, 0) < 130


@pytest.mark.parametrize("bad", [1000.0, 1e-5])
def test_one_bad_sample_hardly_matters(bad: float) -> None:
    costs = taught(1, 100)
    before = costs.prefill_s(8192, 0)
    costs.learn(prefills=[PrefillSample(8192, 0, before * bad)])
    assert costs.prefill_s(8192, 0) == pytest.approx(before, rel=0.25)


def test_follows_a_machine_that_became_slower() -> None:
    costs, rng = taught(2, 200), random.Random(5)
    for _ in range(300):
        tokens = int(2 ** rng.uniform(6, 15))
        costs.learn(prefills=[PrefillSample(tokens, 0, 4 * paper_prefill_s(tokens, 0))])
    assert costs.prefill_s(8192, 0) == pytest.approx(4 * paper_prefill_s(8192, 0), rel=0.2)


SAMPLES = st.lists(
    st.builds(
        PrefillSample,
        st.integers(-5, 200_000),
        st.integers(-5, 200_000),
        st.floats(allow_nan=True, allow_infinity=True),
    ),
    max_size=15,
)


@given(SAMPLES, st.integers(1, 200_000), st.integers(0, 200_000), st.integers(0, 5000))
@settings(max_examples=60, deadline=None)
def test_never_negative_and_never_falls_with_more_tokens(
    samples: list[PrefillSample], tokens: int, prefix: int, more: int
) -> None:
    costs = CostModels()
    costs.learn(prefills=samples)
    now, later = costs.prefill_s(tokens, prefix), costs.prefill_s(tokens + more, prefix)
    assert math.isfinite(now)
    assert now >= 0
    if prefix < tokens:
        assert later >= now * (1 - 1e-9)


def test_decode_learns_batch_and_context() -> None:
    costs, rng = CostModels(), random.Random(3)
    for _ in range(200):
        seqs = rng.randint(1, 64)
        tokens = seqs * rng.randint(10, 8000)
        costs.learn(decodes=[DecodeSample(seqs, tokens, 0.0263 + 1e-4 * seqs + 3.55e-8 * tokens)])
    assert costs.decode_step_s(32, 100_000) == pytest.approx(0.0263 + 3.2e-3 + 3.55e-3, rel=0.05)
    assert costs.decode_step_s(33, 100_000) > costs.decode_step_s(32, 100_000)


def test_transfer_learns_bandwidth_and_latency() -> None:
    costs = CostModels()
    assert costs.transfer_s(0) == 0
    for nbytes in (10_000, 1_000_000, 50_000_000) * 20:
        costs.learn(pulls=[PullSample(nbytes, 0.002 + nbytes / 5e9)])
    assert costs.transfer_s(20_000_000) == pytest.approx(0.006, rel=0.1)


def test_nothing_useless_is_learnt() -> None:
    costs = CostModels()
    before = costs.prefill_s(1000, 0)
    costs.learn(
        [PrefillSample(10, 10, 1.0), PrefillSample(10, 0, math.nan), PrefillSample(10, 0, -1.0)],
        [DecodeSample(0, 0, 1.0)],
        [PullSample(0, 1.0)],
    )
    assert costs.prefill_s(1000, 0) == before
    assert costs.prefill.num_samples == costs.decode.num_samples == costs.transfer.num_samples == 0


@given(st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_the_minimum_satisfies_its_conditions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(6, 4))
    gram, moment = rows.T @ rows + 0.01 * np.eye(4), rng.normal(size=4)
    best = np.array(nonnegative_minimum(gram.tolist(), moment.tolist()))
    gradient = gram @ best - moment
    assert (best >= 0).all()
    assert (gradient >= -1e-7).all()
    assert abs(float(best @ gradient)) < 1e-7


def test_the_ssd_is_learnt_apart() -> None:
    costs = CostModels()
    for nbytes in (1_000_000, 50_000_000, 200_000_000) * 20:
        costs.learn(pulls=[PullSample(nbytes, 0.001 + nbytes / 10e9), PullSample(nbytes, 0.004 + nbytes / 1e9, nbytes)])
        mixed_s = 0.001 + nbytes / 10e9 + 0.004 + nbytes / 1e9
        costs.learn(pulls=[PullSample(2 * nbytes, mixed_s, nbytes)])
    assert costs.transfer_s(100_000_000) == pytest.approx(0.011, rel=0.05)
    assert costs.transfer_s(100_000_000, 100_000_000) == pytest.approx(0.104, rel=0.05)
    assert costs.transfer_s(200_000_000, 100_000_000) == pytest.approx(0.115, rel=0.05)


def test_errors_are_those_of_predictions_made_before_the_sample() -> None:
    costs = CostModels()
    costs.learn(prefills=[PrefillSample(1000, 0, 1.0)])
    assert costs.errors["prefill"].summary().count == 0  # the prior is no prediction of this machine
    costs.learn(prefills=[PrefillSample(1000, 0, 0.5)])
    error = costs.errors["prefill"].summary()
    assert error.count == 1
    assert (error.p50, error.bias) == pytest.approx((1.0, 1.0), rel=0.05)
    for _ in range(400):
        costs.learn(prefills=[PrefillSample(1000, 0, 0.5)])
    error = costs.errors["prefill"].summary()
    assert error.count == 401
    assert error.p90 < 0.02
    assert costs.errors["decode"].summary().count == 0
