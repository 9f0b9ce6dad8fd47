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


@pytest.mark.parametrize(
    ("length", "chunk", "num_new"),
    [(1, 512, 16), (30, 7, 16), (129, 64, 8), (600, 256, 2), pytest.param(1500, 512, 4, marks=pytest.mark.soak)],
)
def test_greedy_tokens_equal_transformers(
    runner: Runner, tokenizer: Tokenizer, reference: PreTrainedModel, length: int, chunk: int, num_new: int
) -> None:
    prompt = (tokenizer.encode(_TEXT) * 40)[:length]
    expected = greedy_by_transformers(reference, prompt, num_new)
    assert greedy(runner, prompt, num_new, range(10, 40), chunk=chunk) == expected


def test_it_knows_the_capital_of_france(runner: Runner, tokenizer: Tokenizer) -> None:
    chat = tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    answer = greedy(runner, tokenizer.encode(chat), 8, range(4))
    assert "Paris" in tokenizer.decode(answer)
