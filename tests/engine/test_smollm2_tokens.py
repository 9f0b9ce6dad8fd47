"""The default model gives the tokens transformers gives on the same weights, for prompts of 1 to 1,500 tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tiny_models import greedy, greedy_by_transformers, load_runner

from moonpool.engine.model_files import resolve
from moonpool.engine.runner import Runner
from moonpool.engine.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.model

_TEXT = (
    "The pool keeps every block that was ever computed, until somebody needs its place. A block is sixty-four "
    "tokens of one conversation; whoever says the same words again finds it there. "
)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return load_runner("smollm2", num_pages=64, block_tokens=64)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve("smollm2"))


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    """The same file, read by transformers itself."""
    from transformers import AutoModelForCausalLM

    path = resolve("smollm2").root
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.train(False)
    return model


# (length of the prompt, chunk): what transformers said. It takes a minute to ask it, so `make soak` does.
CASES = [(1, 512), (30, 7), (129, 64), (600, 256), pytest.param(1500, 512, marks=pytest.mark.soak)]
BY_TRANSFORMERS = {
    1: [29, 1195, 29, 6693, 29, 271, 29, 81, 29, 6693, 29, 1714, 29, 86, 403, 37744],
    30: [768, 28, 4364, 288, 1446, 260, 1532, 30, 198, 198, 504, 768, 338, 416, 325, 1137],
    129: [30, 330, 3608, 314, 20992, 29, 13996, 17837],
    600: [1142, 1924],
    1500: [314, 20992, 29, 13996],
}


def prompt_of(tokenizer: Tokenizer, length: int) -> list[int]:
    return (tokenizer.encode(_TEXT) * 40)[:length]


@pytest.mark.parametrize(("length", "chunk"), CASES)
def test_greedy_tokens_equal_transformers(runner: Runner, tokenizer: Tokenizer, length: int, chunk: int) -> None:
    expected = BY_TRANSFORMERS[length]
    assert greedy(runner, prompt_of(tokenizer, length), len(expected), range(10, 40), chunk=chunk) == expected


@pytest.mark.soak
@pytest.mark.parametrize("length", BY_TRANSFORMERS)
def test_transformers_says_what_is_written_here(tokenizer: Tokenizer, reference: PreTrainedModel, length: int) -> None:
    wanted = BY_TRANSFORMERS[length]
    assert greedy_by_transformers(reference, prompt_of(tokenizer, length), len(wanted)) == wanted


def test_it_knows_the_capital_of_france(runner: Runner, tokenizer: Tokenizer) -> None:
    chat = tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    answer = greedy(runner, tokenizer.encode(chat), 8, range(4))
    assert "Paris" in tokenizer.decode(answer)
