"""Where fetching beats computing: the paper's figures, and the form with measured models."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.costs import CostModels, LearnedCost
from moonpool.conductor.crossover import break_even_bandwidth, break_even_tokens, crossover

LLAMA3_70B = {"width": 8192, "gqa": 8}
TOKEN_NBYTES = 327_680


@pytest.mark.parametrize(
    ("prefix", "gbytes_s"), [(1024, 6.77), (4096, 6.35), (8192, 5.86), (16384, 5.08), (65536, 2.82), (131072, 1.77)]
)
def test_the_papers_bandwidths_for_eight_a800(prefix: int, gbytes_s: float) -> None:
    assert break_even_bandwidth(8 * 312e12, prefix, **LLAMA3_70B) / 1e9 == pytest.approx(gbytes_s, abs=0.006)


def test_the_papers_bandwidth_for_eight_h800() -> None:
    assert break_even_bandwidth(8 * 989.5e12, 8192, **LLAMA3_70B) / 1e9 == pytest.approx(18.6, abs=0.05)


@given(st.floats(1e12, 1e16), st.floats(1e8, 1e12))
def test_the_break_even_length_is_where_the_bandwidth_breaks_even(flops: float, nbytes_s: float) -> None:
    tokens = break_even_tokens(flops, nbytes_s, **LLAMA3_70B)
    assert break_even_bandwidth(flops, tokens, **LLAMA3_70B) <= nbytes_s * (1 + 1e-9)
    if tokens:
        assert break_even_bandwidth(flops, tokens - 1, **LLAMA3_70B) >= nbytes_s * (1 - 1e-9)


def measured(bandwidth: float, latency_s: float = 1e-3) -> CostModels:
    """paper.md D's fit of measured prefills, per token."""
    prefill = LearnedCost((0.068, 0.1123 / 1024, 7.79e-4 / 1024**2, 2.63e-3 / 1024))
    return CostModels(prefill, transfer=LearnedCost((latency_s, 1 / bandwidth)))


def test_with_measured_prefills_less_bandwidth_will_do() -> None:
    found = crossover(measured(86e9), TOKEN_NBYTES, at_tokens=8192)
    assert found.break_even_nbytes_s / 1e9 == pytest.approx(2.7, abs=0.3)  # paper.md D: 2.7 GB/s at 8k
    assert found.measured_nbytes_s == pytest.approx(86e9)
    assert found.pulled_tokens_s == pytest.approx(8192 / (1e-3 + 8192 * TOKEN_NBYTES / 86e9))
    assert found.computed_tokens_s == pytest.approx(8700, rel=0.1)
    assert found.min_tokens is not None
    assert found.min_tokens < 50
    far = crossover(measured(86e9), TOKEN_NBYTES, at_tokens=131072)
    assert far.break_even_nbytes_s / 1e9 == pytest.approx(1.6, abs=0.2)


def test_a_link_may_be_too_slow_for_short_ones_or_for_all() -> None:
    slow = crossover(measured(2e9), TOKEN_NBYTES).min_tokens
    assert slow is not None
    assert slow > 50_000  # attention's part makes long prefixes dear enough
    assert crossover(measured(1e6), TOKEN_NBYTES).min_tokens is None


@given(st.floats(1e7, 1e12), st.floats(1e-5, 1.0))
def test_the_first_prefix_is_the_first(bandwidth: float, latency_s: float) -> None:
    costs = measured(bandwidth, latency_s)
    first = crossover(costs, TOKEN_NBYTES).min_tokens

    def saves(tokens: int) -> bool:
        saved_s = costs.prefill_s(tokens + 1, 0) - costs.prefill_s(tokens + 1, tokens)
        return costs.transfer_s(tokens * TOKEN_NBYTES) < saved_s

    if first is None:
        assert not saves(1 << 20)
    else:
        assert saves(first)
        assert first == 1 or not saves(first - 1)


def test_a_transfer_that_never_pays() -> None:
    found = crossover(CostModels(transfer=LearnedCost((1e6, 1e-9))), TOKEN_NBYTES)
    assert (found.min_tokens, found.break_even_nbytes_s) == (None, math.inf)
