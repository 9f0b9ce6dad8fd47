"""On a GPU, `pytest -m gpu`: greedy tokens in float32 are those of the CPU engine of the same machine."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from random_model import small_model, token_prompt

from moonpool.engine.config import EngineConfig
from moonpool.engine.load import load_engine
from moonpool.engine.model_files import read_config, resolve
from moonpool.engine.sequence import SamplingParams
from moonpool.engine.weights import random_weights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def answers(folder: Path, device: str, prompts: list[list[int]]) -> list[list[int]]:
    config = EngineConfig(num_pages=1024, block_tokens=64, max_batch_tokens=512, max_model_len=2048, device=device)
    engine = load_engine(str(folder), config, random_weights=True)
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    return [answer.tokens for answer in engine.generate(prompts, greedy)]


def test_random_weights_are_those_of_the_cpu(tmp_path: Path) -> None:
    config = read_config(resolve(str(small_model(tmp_path / "small"))))
    for dtype in ("float32", "bfloat16", "float16"):
        here, there = (random_weights(config, dtype=dtype, device=device) for device in ("cpu", "cuda:0"))
        for name in ("qkv", "output", "gate_up", "down"):
            assert torch.equal(getattr(here.layers[1], name), getattr(there.layers[1], name).cpu())
        assert torch.equal(here.embedding, there.embedding.cpu())


def test_twenty_prompts_of_1_to_1500_tokens(tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder, rng = small_model(tmp_path / "small"), random.Random(13)
    lengths = [1, 1500, *(rng.randrange(1, 1501) for _ in range(18))]
    prompts = [token_prompt(length, seed) for seed, length in enumerate(lengths)]
    on_cpu = answers(folder, "cpu", prompts)
    assert answers(folder, "cuda:0", prompts) == on_cpu  # all at once
    assert [answers(folder, "cuda", [prompt])[0] for prompt in prompts[:3]] == on_cpu[:3]  # and alone
