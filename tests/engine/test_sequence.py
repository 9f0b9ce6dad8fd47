"""A Sequence keeps its tokens, keys and chunks in step, and impossible sampling values cannot exist."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import InvalidInput
from moonpool.base.keys import chain_keys
from moonpool.engine.sequence import SamplingParams, Sequence, pages_for

ROOT = bytes(range(32))


def sequence(prompt: list[int], block_tokens: int = 4, **more: Any) -> Sequence:
    return Sequence("r", prompt, SamplingParams(max_tokens=8), root=ROOT, block_tokens=block_tokens, **more)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20), st.lists(st.integers(0, 9), max_size=20))
def test_keys_grown_token_by_token_are_the_chain(prompt: list[int], output: list[int]) -> None:
    grown = sequence(prompt)
    for token in output:
        grown.append(token)
    assert grown.tokens == prompt + output
    assert grown.output == output
    assert grown.keys == chain_keys(ROOT, prompt + output, 4)
    assert grown.keys == sequence(prompt, output=output).keys


@pytest.mark.parametrize(("length", "reusable"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_full_hit_leaves_a_token_to_compute(length: int, reusable: int) -> None:
    assert sequence(list(range(length))).num_reusable_blocks == reusable


def test_chunk_is_a_frozen_copy() -> None:
    it = sequence([1, 2, 3, 4, 5])
    it.pages = [7, 9]
    it.num_computed_tokens = 2
    first, last = it.chunk(2), it.chunk(3)
    it.pages.append(11)
    assert (first.start, first.end, first.tokens, first.pages) == (2, 4, (3, 4), (7, 9))
    assert (first.wants_logits, last.wants_logits) == (False, True)


def test_pages_for() -> None:
    assert [pages_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidInput):
        sequence([])


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", 9),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("min_p", -0.5),
        ("seed", 2**64),
        ("presence_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("logprobs", -1),
    ],
)
def test_impossible_sampling_values(param: str, value: float) -> None:
    values: dict[str, Any] = {"max_tokens": 8, param: value}
    with pytest.raises(InvalidInput) as raised:
        SamplingParams(**values)
    assert raised.value.param == param


def test_sampling_params_cross_the_wire() -> None:
    params = SamplingParams(max_tokens=3, top_k=5, stop_token_ids=(1, 2), logprobs=0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
