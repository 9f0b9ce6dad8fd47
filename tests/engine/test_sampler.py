"""Sampling: the right distribution, the right filters, and nothing but seed and position decides the draw."""

import math
from collections import Counter
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.engine.sampler import SampledToken, SampleRow, sample, uniform
from moonpool.engine.sequence import SamplingParams

GOLDEN_UNIFORMS = [0.03552156286851116, 0.43314846409807795, 0.9479227881958844]


def row(tokens: list[int] | None = None, num_prompt: int = 1, barred: set[int] | None = None, **p: Any) -> SampleRow:
    tokens = [0] if tokens is None else tokens
    params = SamplingParams(**{"max_tokens": 4, **p})
    return SampleRow(params, tokens, num_prompt, frozenset(barred or ()))


def sampled(logits: torch.Tensor, rows: list[SampleRow]) -> list[SampledToken]:
    drawn = sample(logits, rows)
    assert all(isinstance(each, SampledToken) for each in drawn)
    return cast(list[SampledToken], drawn)


def tokens(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return [each.token for each in sampled(logits, rows)]


def one(logits: list[float], **p: Any) -> int:
    return tokens(torch.tensor([logits]), [row(**p)])[0]


def support(logits: list[float], **p: Any) -> set[int]:
    """All tokens that come out over many seeds."""
    draws = 400
    return set(tokens(torch.tensor([logits] * draws), [row(seed=seed, **p) for seed in range(draws)]))


def test_uniform_is_fixed_for_ever() -> None:
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1)] == pytest.approx(GOLDEN_UNIFORMS, abs=0)
    values = [uniform(7, position) for position in range(4000)]
    assert 0 <= min(values) < 0.01
    assert 0.99 < max(values) < 1
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)


def test_greedy_takes_the_first_of_the_best() -> None:
    assert one([0.0, 3.0, 3.0], temperature=0) == 1
    assert one([0.0, 3.0, 3.0], top_k=1) == 1


def chi_square(probabilities: torch.Tensor, **p: Any) -> float:
    """How far draws at many positions are from the distribution they should follow."""
    draws = 20_000
    logits = probabilities.log().float().expand(draws, -1)
    rows = [row([0] * 1, seed=seed, **p) for seed in range(draws)]
    counts = Counter(tokens(logits, rows))
    shares: list[float] = probabilities.tolist()
    return sum((counts[i] - draws * q) ** 2 / (draws * q) for i, q in enumerate(shares))


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])
    assert chi_square(probabilities) < 18.5  # 4 degrees of freedom, p = 0.001


def test_temperature_flattens() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    draws = 10_000
    rows = [row(seed=seed, temperature=2.0) for seed in range(draws)]
    counts = Counter(tokens(logits.expand(draws, -1), rows))
    expected = (logits / 2).softmax(-1).tolist()
    assert [counts[i] / draws for i in range(3)] == pytest.approx(expected, abs=0.02)


LOGITS = [math.log(q) for q in (0.4, 0.3, 0.2, 0.1)]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.35}, {0}),
        ({"top_p": 0.69}, {0, 1}),
        ({"top_p": 0.75}, {0, 1, 2}),
        ({"min_p": 0.45}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.7}, {0, 1}),  # of the mass that top_k leaves
        ({"min_p": 0.3, "top_p": 0.8}, {0, 1, 2}),
        ({"barred": {0}}, {1, 2, 3}),
        ({"barred": {0, 999}, "top_k": 1}, {1}),
    ],
)
def test_filters_keep_exactly(params: dict[str, Any], kept: set[int]) -> None:
    assert support(LOGITS, **params) == kept


def test_ties_with_the_last_one_kept_are_kept() -> None:
    assert support([1.0, 1.0, 1.0, 0.0], top_k=2) == {0, 1, 2}


@pytest.mark.parametrize("params", [{"top_p": 0.3}, {"top_p": 0.95}, {"top_k": 40}, {"top_k": 2000, "top_p": 0.9}])
def test_a_large_vocabulary_is_filtered_as_a_plain_sort_would(params: dict[str, Any]) -> None:
    torch.manual_seed(1)
    for scale in (0.01, 3.0):  # almost flat: the nucleus outgrows the candidates; peaked: it does not
        logits = torch.randn(5000) * scale
        order = logits.double().softmax(-1).sort(descending=True)
        k = params.get("top_k", 5000)
        mass = order.values[:k].cumsum(-1) / order.values[:k].sum()
        size = int((mass < params.get("top_p", 1.0)).sum()) + 1
        allowed = set(order.indices[: min(size, k)].tolist())
        picked = set(tokens(logits.expand(300, -1), [row(seed=i, **params) for i in range(300)]))
        assert picked <= allowed
        assert len(picked) > min(len(allowed), 300) / 5


def test_penalties_as_openai_and_vllm_define_them() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    seen = {"tokens": [0, 1, 2, 2], "num_prompt": 2, "temperature": 0, "logprobs": 0}

    def best(**p: Any) -> int:
        return tokens(logits, [row(**{**seen, **p})])[0]

    assert best() == 0
    assert best(repetition_penalty=5.0) == 3  # 2/5 and 1/5: prompt and output both count
    assert best(presence_penalty=-1.5) == 2  # only the output counts: 1 + 1.5
    assert best(frequency_penalty=-0.6) == 2  # twice: 1 + 1.2
    assert best(frequency_penalty=-0.4) == 0
    assert logits.tolist() == [[2.0, -2.0, 1.0, 0.5]]


def test_repetition_pushes_negative_logits_down() -> None:
    assert one([-1.0, -1.5], tokens=[0], temperature=0, repetition_penalty=2.0) == 1


def test_logprobs_are_those_of_the_model() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    raw = logits[0].log_softmax(-1).tolist()
    (got,) = sampled(logits, [row(temperature=0, logprobs=2, barred={1})])
    assert got.token == 2
    assert got.logprob == pytest.approx(raw[2])
    assert [t for t, _ in got.top_logprobs] == [1, 2]
    assert [p for _, p in got.top_logprobs] == pytest.approx([raw[1], raw[2]])
    (chosen_only,) = sampled(logits, [row(logprobs=0)])
    assert chosen_only.logprob is not None
    assert chosen_only.top_logprobs == ()
    (all_of_them,) = sampled(logits, [row(logprobs=20)])
    assert len(all_of_them.top_logprobs) == 3


PARAMS = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**64 - 1), "temperature": st.sampled_from([0.0, 0.3, 1.0, 5.0])},
    optional={
        "top_k": st.sampled_from([1, 3, 50, 1500]),
        "top_p": st.sampled_from([0.1, 0.9, 0.99]),
        "min_p": st.sampled_from([0.01, 0.5]),
        "repetition_penalty": st.just(1.3),
        "frequency_penalty": st.just(0.7),
        "logprobs": st.integers(0, 3),
    },
)


@settings(max_examples=40, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 99), st.randoms(use_true_random=False))
def test_neighbours_and_their_order_do_not_matter(params: list[dict[str, Any]], salt: int, random: Any) -> None:
    generator = torch.Generator().manual_seed(salt)
    logits = torch.randn(len(params), 2000, generator=generator) * 2
    rows = [row([5, 9, *range(i)], num_prompt=2, **p) for i, p in enumerate(params)]
    alone = [sample(logits[i : i + 1], [rows[i]])[0] for i in range(len(rows))]
    order = list(range(len(rows)))
    random.shuffle(order)
    together = sample(logits[order], [rows[i] for i in order])
    assert together == [alone[i] for i in order]


def test_another_position_or_seed_is_another_draw() -> None:
    logits = torch.zeros(64, 1000)
    by_position = tokens(logits, [row([0] * (n + 1)) for n in range(64)])
    by_seed = tokens(logits, [row(seed=n) for n in range(64)])
    assert len(set(by_position)) > 50
    assert len(set(by_seed)) > 50
