"""Prefill and decode apart give the very tokens that one process gives (tests/engine/test_smollm2_tokens.py compares
that one with transformers).

Prompts of 1 to 1,500 tokens, conversations among them, first cold and then with hits; and the bytes in the decode
workers' pages are those that prefill computed. One worker of each role with the default model, two with random weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from e2e_service import Service, keys_of
from random_model import small_model, token_prompt
from severe import WrongBytes, check_tokens

from moonpool.base.errors import NotFound
from moonpool.engine.model_files import resolve
from moonpool.engine.tokenizer import Tokenizer, load_tokenizer

MODEL = "smollm2"
MAX_TOKENS = 8
LENGTHS = (1, 2, 3, 17, 63, 64, 65, 127, 128, 129, 200, 320, 449, 640, 1000, 1500)
REAL_LENGTHS = (1, 129, 400)


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve(MODEL))


@cache
def real_prompts() -> list[list[int]]:
    """Texts cut to length, and a conversation of two turns, the second turn containing the first."""
    story = " ".join(
        f"In the year {1500 + 3 * i}, traveller {i % 13} crossed river {i * 7 % 29} and met {i % 5 + 1} merchants."
        for i in range(100)
    )
    tokens = tokenizer().encode(story)
    cut = [tokens[length : 2 * length] for length in REAL_LENGTHS]
    assert [len(prompt) for prompt in cut] == list(REAL_LENGTHS)
    return cut + [tokenizer().encode(text) for text in conversation()]


def conversation() -> list[str]:
    def render(turns: list[tuple[str, str]]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        return tokenizer().render_chat(messages, add_generation_prompt=True)

    first = [("user", "Name three rivers of Europe and say one sentence about each of them.")]
    second = [*first, ("assistant", "The Rhine, the Danube and the Loire. " * 8), ("user", "Which is the longest?")]
    return [render(first), render(second)]


def random_prompts() -> list[list[int]]:
    """One of each length, and two that continue others."""
    cut = [token_prompt(length, seed=length) for length in LENGTHS]
    return [*cut, cut[-4] + token_prompt(100, 1), cut[-2] + token_prompt(30, 2)]


def one_process(model: str, prompts: Sequence[list[int]], *, random_weights: bool = False) -> list[list[int]]:
    """What the engine says when everything happens in one process."""
    from moonpool.engine.config import EngineConfig
    from moonpool.engine.load import load_engine
    from moonpool.engine.sequence import SamplingParams

    engine = load_engine(model, EngineConfig(num_pages=80), random_weights=random_weights)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    return [engine.generate([prompt], params)[0].tokens for prompt in prompts]


def check(service: Service, prompts: Sequence[list[int]], expected: list[list[int]]) -> None:
    cold = [service.generate(prompt, MAX_TOKENS) for prompt in prompts]
    check_tokens([answer.tokens for answer in cold], expected, "cold")
    warm = [service.generate(prompt, MAX_TOKENS) for prompt in prompts]
    check_tokens([answer.tokens for answer in warm], expected, "warm")
    for answer, prompt in zip(warm, prompts, strict=True):
        assert answer.prefill is not None
        reused = answer.prefill.local_tokens + answer.prefill.pool_tokens
        assert reused == (len(prompt) - 1) // 64 * 64
    together = service.generate_all(list(prompts), MAX_TOKENS)
    check_tokens([answer.tokens for answer in together], expected, "together")
    check_pages(service, prompts)


def check_pages(service: Service, prompts: Sequence[list[int]]) -> None:
    """Every block that several workers hold has the same bytes in all of them."""
    names = [worker.info.name for worker in service.status().workers]
    assert {name.split("-")[0] for name in names} == {"prefill", "decode"}
    num_shared = 0
    keys = {key for prompt in prompts for key in keys_of(prompt)}
    for key in keys:
        found = {}
        for name in names:
            try:
                found[name] = service.piece_checksums(name, key)
            except NotFound:
                continue
        if len(set(found.values())) > 1:
            raise WrongBytes(f"pages differ: {sorted(found)}")
        num_shared += {name.split("-")[0] for name in found} == {"prefill", "decode"}
    assert num_shared == len(keys), "every block was computed on one side and decoded on the other"


@pytest.mark.model
def test_one_prefill_one_decode(smollm2: Service) -> None:
    check(smollm2, real_prompts(), one_process(MODEL, real_prompts()))


def test_two_prefill_two_decode(two_each: Service, tmp_path: Path) -> None:
    prompts = random_prompts()
    check(two_each, prompts, one_process(str(small_model(tmp_path / "small")), prompts, random_weights=True))
