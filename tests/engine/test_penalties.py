"""Penalties from counts that are kept from step to step: the tokens are those of counting everything in each step."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from severe import check_bytes, check_tokens

from moonpool.base.errors import MoonpoolError
from moonpool.engine.penalties import CountPlace, CountSlots, count_tokens, fits_16_bits
from moonpool.engine.sampler import HostAdjuster, SampledToken, SampleRow, sample
from moonpool.engine.sequence import SamplingParams

VOCAB = 12
HUGE = torch.finfo(torch.float32).max


def recounted(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    """Return one row of logits after penalties and bars, all tokens of the row counted now."""
    adjusted, params = logits.clone(), row.params
    if params.repetition_penalty != 1.0:
        factor = min(max(params.repetition_penalty, 1e-30), 1e30)
        seen = torch.tensor(sorted(set(row.tokens)))
        values = adjusted[seen]
        adjusted[seen] = bounded(torch.where(values > 0, values / factor, values * factor), values)
    counts = Counter(row.tokens[row.num_prompt_tokens :])
    if counts and (params.frequency_penalty or params.presence_penalty):
        times = torch.tensor([counts[t] for t in sorted(counts)], dtype=torch.float32)
        frequency, presence = (min(max(p, -1e30), 1e30) for p in (params.frequency_penalty, params.presence_penalty))
        seen = torch.tensor(sorted(counts))
        values = adjusted[seen]
        adjusted[seen] = bounded(values - (frequency * times + presence), values)
    adjusted[[t for t in row.barred if 0 <= t < VOCAB]] = -torch.inf
    return adjusted


def bounded(penalized: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    return penalized.clamp(-HUGE, HUGE).masked_fill_(before == -torch.inf, -torch.inf)


def sampled_from(logits: torch.Tensor, row: SampleRow) -> int | str:
    """Return the token that is sampled from one row, or the class of its error."""
    adjusted = recounted(logits, row)
    if not math.isfinite(logits.max()):
        return "Internal"
    if not math.isfinite(adjusted.max()):
        return "InvalidInput"
    plain = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    params = SamplingParams(**{name: getattr(row.params, name) for name in row.params.__struct_fields__} | plain)
    (outcome,) = sample(adjusted[None], [replace(row, params=params, barred=frozenset())])
    assert isinstance(outcome, SampledToken)
    return outcome.token


def told(outcome: SampledToken | MoonpoolError) -> int | str:
    return outcome.token if isinstance(outcome, SampledToken) else type(outcome).__name__


penalty = st.sampled_from([0.0, 0.4, -0.7, 2.0, 1e300, -1e300])
PARAMS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.8]), "seed": st.integers(0, 99)},
    optional={
        "repetition_penalty": st.sampled_from([1.0, 1.05, 1.3, 0.6, 5.0, 1e300, 1e-300]),
        "presence_penalty": penalty,
        "frequency_penalty": penalty,
        "logprobs": st.just(2),
        "top_k": st.just(4),
    },
)
TOKEN = st.integers(0, VOCAB - 1)
LOGITS = st.lists(
    st.floats(-8, 8, width=32) | st.sampled_from([-math.inf, HUGE, -HUGE, 0.0, math.nan, math.inf]),
    min_size=VOCAB,
    max_size=VOCAB,
)
USUAL_LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB)
# A step: which sequences are in the batch, what they may not sample, and the logits. Sequences that are left out have
# been preempted; more sequences than slots take each other's counts.
STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 5), st.frozensets(TOKEN, max_size=3)), max_size=3, unique_by=lambda e: e[0]),
        st.lists(USUAL_LOGITS | LOGITS, min_size=3, max_size=3),
    ),
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(PARAMS, st.lists(TOKEN, min_size=1, max_size=6)), min_size=6, max_size=6), STEPS)
def test_tokens_are_those_of_counting_everything_again(
    requests: list[tuple[dict[str, Any], list[int]]], steps: list[tuple[list[tuple[int, frozenset[int]]], Any]]
) -> None:
    check_steps(requests, steps)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@settings(max_examples=10_000, deadline=None)
@given(st.lists(st.tuples(PARAMS, st.lists(TOKEN, min_size=1, max_size=6)), min_size=6, max_size=6), STEPS)
def test_many_steps(
    requests: list[tuple[dict[str, Any], list[int]]], steps: list[tuple[list[tuple[int, frozenset[int]]], Any]]
) -> None:
    check_steps(requests, steps)


def check_steps(
    requests: list[tuple[dict[str, Any], list[int]]], steps: list[tuple[list[tuple[int, frozenset[int]]], Any]]
) -> None:
    adjuster = HostAdjuster(num_slots=3, max_seq_tokens=40)
    histories = [list(prompt) for _, prompt in requests]
    for batch, values in steps:
        logits = torch.tensor(values[: len(batch)]).reshape(-1, VOCAB)
        rows = [
            SampleRow(SamplingParams(max_tokens=99, **requests[n][0]), histories[n], len(requests[n][1]), barred)
            for n, barred in batch
        ]
        expected = [sampled_from(one, row) for one, row in zip(logits, rows, strict=True)]
        before = logits.clone()
        found = sample(logits, rows, adjuster)
        assert [told(each) for each in found] == expected
        check_bytes(logits.numpy().tobytes(), before.numpy().tobytes(), "the model's logits, after sampling")
        for (number, _), token in zip(batch, expected, strict=True):
            if isinstance(token, int):
                histories[number].append(token)


def test_adjusted_logits_are_the_same_to_the_last_bit() -> None:
    torch.manual_seed(3)
    tokens = torch.randint(VOCAB, (40,)).tolist()
    params = SamplingParams(max_tokens=9, repetition_penalty=1.05, presence_penalty=0.3, frequency_penalty=0.07)
    adjuster, row = HostAdjuster(1, 99), SampleRow(params, [*tokens[:20]], 8)
    for token in tokens[20:]:
        logits = torch.randn(1, VOCAB) * 5
        wanted = recounted(logits[0], row)
        with adjuster.adjusted(logits, [row]) as adjusted:
            check_bytes(adjusted.logits.numpy().tobytes(), wanted.numpy().tobytes(), "adjusted logits")
        assert isinstance(row.tokens, list)
        row.tokens.append(token)


def test_a_step_counts_one_token_of_each_sequence() -> None:
    slots, tokens, other = CountSlots(2), [1, 2, 3], [4]
    assert slots.place([(tokens, 2)]) == [CountPlace(0, is_new=True, is_due=False)]
    tokens.append(9)
    assert slots.place([(other, 1), (tokens, 2)]) == [CountPlace(1, True, False), CountPlace(0, False, True)]
    assert slots.place([(tokens, 2)]) == [CountPlace(0, False, False)], "the same step again"
    assert slots.place([(tokens, 2)], num_ahead=1) == [CountPlace(0, False, True)]
    tokens.append(5)
    assert slots.place([(tokens, 2)]) == [CountPlace(0, False, False)], "it was counted before it was read"


def test_a_token_that_was_counted_and_then_dropped_is_forgotten() -> None:
    slots, tokens = CountSlots(1), [1, 2, 3]
    slots.place([(tokens, 2)])
    slots.place([(tokens, 2)], num_ahead=1)
    assert slots.place([(tokens, 2)]) == [CountPlace(0, is_new=True, is_due=False)]


def test_the_sequence_that_was_sampled_least_recently_gives_its_slot_away() -> None:
    slots, (a, b, c) = CountSlots(2), ([1], [2], [3])
    slots.place([(a, 1), (b, 1)])
    assert slots.place([(c, 1), (a, 1)]) == [CountPlace(1, True, False), CountPlace(0, False, False)]
    assert slots.place([(b, 1), (c, 1)]) == [CountPlace(0, True, False), CountPlace(1, False, False)]


def test_a_row_that_cannot_be_counted_does_not_spoil_the_counts_of_others() -> None:
    params = SamplingParams(max_tokens=9, temperature=0, presence_penalty=5.0)
    adjuster, logits = HostAdjuster(4, 99), torch.tensor([[3.0, 2.0, 1.0]])
    good, bad = SampleRow(params, [0], 1), SampleRow(params, [77], 1)
    assert sample(logits, [good], adjuster) == [SampledToken(0)]
    assert isinstance(good.tokens, list)
    good.tokens.append(0)
    with pytest.raises(IndexError):
        sample(logits.expand(2, -1), [bad, good], adjuster)
    (found,) = sample(logits, [good], adjuster)
    assert isinstance(found, SampledToken)
    check_tokens([found.token], [1], "after the failure of a neighbour")


@pytest.mark.parametrize("wide", [False, True])
def test_counts_tell_output_from_prompt(wide: bool) -> None:
    counts = count_tokens([0, 1, 1, 1, 2, 2], 2, 4, wide=wide)
    assert counts.tolist() == [~0, ~2, 2, 0]
    assert counts.dtype == (np.int32 if wide else np.int16)


def test_16_bits_hold_the_counts_of_32k_tokens() -> None:
    assert fits_16_bits(32_768)
    assert not fits_16_bits(32_769)
    longest = count_tokens([0] * 32_768, 1, 1, wide=False)
    assert longest.tolist() == [~32_767]
