"""Prefill and decode apart give the very tokens that one process gives, and that transformers gives.

Twenty prompts of 1 to 1,500 tokens, conversations among them, first cold and then with hits; and the bytes in the
decode workers' pages are those that prefill computed.
"""

from __future__ import annotations

from functools import cache

import pytest
from e2e_service import Service, keys_of

from moonpool.base.errors import NotFound
from moonpool.engine.model_files import read_config, resolve
from moonpool.engine.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.model

MODEL = "smollm2"
MAX_TOKENS = 12
LENGTHS = (1, 2, 3, 17, 63, 64, 65, 127, 128, 129, 200, 320, 449, 640, 1000, 1500)


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve(MODEL))


@cache
def prompts() -> list[list[int]]:
    """Sixteen texts cut to length, and two conversations of two turns each, the second turn containing the first."""
    story = " ".join(
        f"In the year {1500 + 3 * i}, traveller {i % 13} crossed river {i * 7 % 29} and met {i % 5 + 1} merchants."
        for i in range(200)
    )
    tokens = tokenizer().encode(story)
    cut = [tokens[length : 2 * length] if 2 * length < len(tokens) else tokens[:length] for length in LENGTHS]
    assert [len(prompt) for prompt in cut] == list(LENGTHS)
    return cut + [tokenizer().encode(text) for text in conversations()]


def conversations() -> list[str]:
    def render(turns: list[tuple[str, str]]) -> str:
        messages = [{"role": role, "content": content} for role, content in turns]
        return tokenizer().render_chat(messages, add_generation_prompt=True)

    first = [("user", "Name three rivers of Europe and say one sentence about each of them.")]
    second = [*first, ("assistant", "The Rhine, the Danube and the Loire. " * 8), ("user", "Which is the longest?")]
    other = [("system", "You answer in one short sentence."), ("user", "Why is the sky blue?")]
    fourth = [*other, ("assistant", "Because air scatters blue light most."), ("user", "And at sunset?")]
    return [render(turns) for turns in (first, second, other, fourth)]


@pytest.fixture(scope="module")
def single_process() -> list[list[int]]:
    """What the engine says when everything happens in one process."""
    from moonpool.engine.config import EngineConfig
    from moonpool.engine.load import load_engine
    from moonpool.engine.sequence import SamplingParams

    engine = load_engine(MODEL, EngineConfig(num_pages=80))
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    return [engine.generate([prompt], params)[0].tokens for prompt in prompts()]


@pytest.fixture(scope="module")
def expected(single_process: list[list[int]]) -> list[list[int]]:
    """What transformers says, on the same weights: the most likely token after each prompt, and after each further
    token. One pass per prompt computes them all, with the engine's tokens behind the prompt: as long as these are
    right, they are what transformers would have gone on with."""
    import torch
    from transformers import AutoModelForCausalLM

    path = resolve(MODEL).root
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()
    answers = []
    with torch.inference_mode():
        for prompt, tokens in zip(prompts(), single_process, strict=True):
            logits = model(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=len(tokens)).logits
            answers.append(logits[0].argmax(-1).tolist())
    return answers


def check(service: Service, expected: list[list[int]]) -> None:
    cold = [service.generate(prompt, MAX_TOKENS) for prompt in prompts()]
    assert [answer.tokens for answer in cold] == expected
    warm = [service.generate(prompt, MAX_TOKENS) for prompt in prompts()]
    assert [answer.tokens for answer in warm] == expected
    for answer, prompt in zip(warm, prompts(), strict=True):
        assert answer.prefill is not None
        reused = answer.prefill.local_tokens + answer.prefill.pool_tokens
        assert reused == (len(prompt) - 1) // 64 * 64
    together = service.generate_all(prompts(), MAX_TOKENS)
    assert [answer.tokens for answer in together] == expected
    check_pages(service)


def check_pages(service: Service) -> None:
    """Every block that several workers hold has the same bytes in all of them."""
    names = [worker.info.name for worker in service.status().workers]
    assert {name.split("-")[0] for name in names} == {"prefill", "decode"}
    num_shared = 0
    for prompt in prompts():
        for key in keys_of(prompt):
            found = {}
            for name in names:
                try:
                    found[name] = service.piece_checksums(name, key)
                except NotFound:
                    continue
            assert len(set(found.values())) <= 1, f"pages differ: {sorted(found)}"
            num_shared += {name.split("-")[0] for name in found} == {"prefill", "decode"}
    assert num_shared >= 20, "too few blocks were found on both sides to prove anything"


def test_one_process_equals_transformers(single_process: list[list[int]], expected: list[list[int]]) -> None:
    assert len(expected) == 20
    assert single_process == expected
    eos = read_config(resolve(MODEL)).eos_ids
    for tokens in single_process:
        assert not set(tokens[:-1]) & set(eos)
        assert len(tokens) == MAX_TOKENS or tokens[-1] in eos, "an answer ends early only at the end of its text"


def test_one_prefill_one_decode(one_each: Service, expected: list[list[int]]) -> None:
    check(one_each, expected)


def test_two_prefill_two_decode(two_each: Service, expected: list[list[int]]) -> None:
    check(two_each, expected)
