"""Sampling values at the edges of what floats can hold: nothing raises, nothing is NaN, a bad row stays alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.errors import Internal, InvalidInput, MoonpoolError
from moonpool.engine.sampler import SampledToken, SampleRow, sample
from moonpool.engine.sequence import SamplingParams

VOCAB = 6
GREATEST = torch.finfo(torch.float32).max


def row(tokens: tuple[int, ...] = (0,), barred: frozenset[int] = frozenset(), **params: Any) -> SampleRow:
    return SampleRow(SamplingParams(**{"max_tokens": 4, **params}), tokens, 1, barred)


def finite(low: float, high: float, *, exclude_min: bool = False) -> st.SearchStrategy[float]:
    """Every double in the range, with the edges of float32 and of double often among them."""
    edges = [5e-324, 1e-300, 1e-46, 1e-45, 1e-40, 1.17e-38, 1e-30, 1e-3, 1.0, 1e30, 3.4e38, 3.5e38, 1e300, 1.7e308]
    signed = [value for edge in edges for value in (edge, -edge) if low <= value <= high]
    anything = st.floats(low, high, exclude_min=exclude_min, allow_nan=False, allow_infinity=False)
    return st.sampled_from(signed) | anything


BIGGEST = 1.7976931348623157e308
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": finite(0.0, BIGGEST),
        "top_p": finite(0.0, 1.0, exclude_min=True),
        "top_k": st.sampled_from([1, 2, VOCAB, 2**31, 2**63 - 1]) | st.integers(1, 2**64 - 1),
        "min_p": finite(0.0, 1.0),
        "seed": st.integers(-(2**63), 2**64 - 1),
        "presence_penalty": finite(-BIGGEST, BIGGEST),
        "frequency_penalty": finite(-BIGGEST, BIGGEST),
        "repetition_penalty": finite(0.0, BIGGEST, exclude_min=True),
        "logprobs": st.sampled_from([0, 1, VOCAB, 2**63 - 1]),
    },
)
ROWS = st.builds(
    lambda params, tokens, barred: row((0, *tokens), barred, **params),
    PARAMS,
    st.lists(st.integers(0, VOCAB - 1), max_size=6).map(tuple),
    st.frozensets(st.sampled_from([-1, *range(VOCAB), VOCAB, 2**63]), max_size=VOCAB + 3),
)
ORDINARY = st.floats(-GREATEST, GREATEST, width=32) | st.sampled_from([0.0, -math.inf, GREATEST, -GREATEST, 1e-45])
LOGITS = st.lists(ORDINARY, min_size=VOCAB, max_size=VOCAB) | st.lists(
    ORDINARY | st.sampled_from([math.nan, math.inf]), min_size=VOCAB, max_size=VOCAB
)


BATCHES = st.lists(st.tuples(LOGITS, ROWS), min_size=1, max_size=3)


@pytest.mark.parametrize("penalty", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_a_penalty_keeps_a_token_out_that_the_model_excluded(penalty: str) -> None:
    """Token 4 was sent before, its logit is -inf, and every possible token is barred."""
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0, -math.inf, -math.inf]])
    (outcome,) = sample(logits, [row((0, 4), frozenset(range(4)), **{penalty: 1.1})])
    assert isinstance(outcome, InvalidInput)


@settings(max_examples=60, deadline=None)
@given(BATCHES)
def test_whatever_the_values_each_row_has_its_token_or_its_own_error(
    batch: list[tuple[list[float], SampleRow]],
) -> None:
    check_batch(batch)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@settings(max_examples=20_000, deadline=None)
@given(BATCHES)
def test_many_values(batch: list[tuple[list[float], SampleRow]]) -> None:
    check_batch(batch)


def check_batch(batch: list[tuple[list[float], SampleRow]]) -> None:
    logits, rows = torch.tensor([each for each, _ in batch], dtype=torch.float32), [each for _, each in batch]
    together = sample(logits, rows)
    for i, (values, one) in enumerate(batch):
        (alone,) = sample(logits[i : i + 1], [one])
        assert str(alone) == str(together[i]), "neighbours change nothing"
        check(values, one, together[i])


def check(logits: list[float], one: SampleRow, outcome: SampledToken | MoonpoolError) -> None:
    if any(math.isnan(value) or value == math.inf for value in logits) or set(logits) == {-math.inf}:
        assert isinstance(outcome, Internal)
    elif all(token in one.barred for token in range(VOCAB) if logits[token] > -math.inf):
        assert isinstance(outcome, InvalidInput)
    else:
        assert isinstance(outcome, SampledToken)
        assert 0 <= outcome.token < VOCAB
        assert outcome.token not in one.barred
        assert logits[outcome.token] > -math.inf
        for logprob in [outcome.logprob or 0.0, *(value for _, value in outcome.top_logprobs)]:
            assert -9999 <= logprob <= 0


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-46, 1e-40, 1e-30])
def test_a_temperature_that_vanishes_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -math.inf]] * 50)
    picked = sample(logits, [row(temperature=temperature, seed=seed) for seed in range(50)])
    assert picked == [SampledToken(1)] * 50


def test_a_temperature_without_bound_is_uniform_over_what_is_possible() -> None:
    logits = torch.tensor([[0.0, 50.0, -50.0, -math.inf]] * 300)
    picked = sample(logits, [row(temperature=1e300, seed=seed) for seed in range(300)])
    counts = [sum(each == SampledToken(token) for each in picked) for token in range(4)]
    assert counts[3] == 0
    assert min(counts[:3]) > 60


@pytest.mark.parametrize("penalty", [1e-300, 1e-46, 1e-40])
def test_a_repetition_penalty_that_vanishes_repeats_the_best_that_was_seen(penalty: float) -> None:
    logits = torch.tensor([[9.0, 1.0, 3.0, -2.0]] * 20)
    seen = (1, 2, 3)
    picked = sample(logits, [row(seen, repetition_penalty=penalty, seed=seed) for seed in range(20)])
    assert picked == [SampledToken(2)] * 20


def test_penalties_that_overflow_against_each_other_leave_a_token() -> None:
    logits = torch.tensor([[9.0, 1.0, 3.0]])
    (barely,) = sample(logits, [row((0, 0, 0), presence_penalty=1e308, frequency_penalty=-1e308, temperature=0)])
    assert barely == SampledToken(0), "twice encouraged and once discouraged"
    (never,) = sample(logits, [row((0, 0), frequency_penalty=1e308, temperature=0)])
    assert never == SampledToken(2)
