"""On a GPU, `pytest -m gpu`: greedy tokens in float32 are those of the CPU engine of the same machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from random_model import small_model, token_prompt
from severe import check_tokens

from moonpool.engine.config import EngineConfig
from moonpool.engine.engine import Engine, GenerationResult
from moonpool.engine.launched import LaunchedStep
from moonpool.engine.load import load_engine
from moonpool.engine.model_files import read_config, resolve
from moonpool.engine.sampler import SampleRow
from moonpool.engine.sequence import Chunk, SamplingParams
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


# What decode graphs do beside drawing a token.
ASKED: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.1, "frequency_penalty": -0.4, "logprobs": 3},
    {"logprobs": 0},
    {"min_tokens": 20, "stop_token_ids": tuple(range(16)), "ignore_eos": False},
]


def engine_of(folder: Path, device: str, num_pages: int) -> Engine:
    config = EngineConfig(
        num_pages=num_pages, block_tokens=64, max_batch_tokens=512, max_model_len=768, device=cast(Any, device)
    )
    return load_engine(str(folder), config, random_weights=True)


def answers_to_all(engine: Engine, max_tokens: int) -> list[GenerationResult]:
    prompts = [token_prompt(60 + 11 * n, n) for n in range(12)]
    base = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    return engine.generate(prompts, [SamplingParams(**{**base, **ASKED[n % len(ASKED)]}) for n in range(12)])


@pytest.mark.parametrize(("num_pages", "max_tokens"), [(1024, 40), (20, 90)], ids=["all at once", "with preemption"])
def test_penalties_bars_and_logprobs_are_those_of_the_cpu(
    tmp_path: Path, num_pages: int, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = small_model(tmp_path / "small")
    here = answers_to_all(engine_of(folder, "cpu", num_pages), max_tokens)
    engine, num_ahead = engine_of(folder, "cuda:0", num_pages), [0]
    launcher = engine._runner.launcher
    assert launcher is not None
    launch = launcher.launch

    def counted(chunks: Sequence[Chunk], rows: Sequence[SampleRow], after: Any = None) -> LaunchedStep:
        num_ahead[0] += after is not None
        return launch(chunks, rows, after)

    monkeypatch.setattr(launcher, "launch", counted)
    there = answers_to_all(engine, max_tokens)
    if num_pages == 20:
        assert engine.scheduler.num_preemptions > 0
    else:
        assert num_ahead[0] >= 25, "most steps are launched ahead"
    for own, cpu, gpu in zip(ASKED * 2, here, there, strict=True):
        check_tokens(gpu.tokens, cpu.tokens, str(own))
        for ours, wanted in zip(gpu.sampled, cpu.sampled, strict=True):
            assert (ours.logprob is None) == (wanted.logprob is None)
            found, expected = ([each.logprob, *dict(each.top_logprobs).values()] for each in (ours, wanted))
            assert found == pytest.approx(expected, abs=2e-3)


def test_a_graph_samples_the_next_best_token_where_the_best_one_is_barred(tmp_path: Path) -> None:
    folder = small_model(tmp_path / "small")
    graphs = engine_of(folder, "cuda:0", 16)._runner.launcher
    assert graphs is not None
    chunk, params = Chunk("r", 0, (5,), (0,), True), SamplingParams(max_tokens=4, temperature=0.0, logprobs=2)
    (usual,) = graphs.launch([chunk], [SampleRow(params, [5], 1)]).outcomes()
    best = frozenset({usual.token})
    (second,) = graphs.launch([chunk], [SampleRow(params, [5], 1, best)]).outcomes()
    assert second.token == usual.top_logprobs[1][0]
    assert second.top_logprobs == usual.top_logprobs


def test_a_graph_of_more_rows_than_the_batch_and_counts_that_come_after_its_capture(tmp_path: Path) -> None:
    """Seven requests in a graph of eight: first without penalties, then with one that is penalized, then without."""
    torch.backends.cuda.matmul.allow_tf32 = False
    folder = small_model(tmp_path / "small")
    prompts = [token_prompt(30 + 7 * n, n) for n in range(7)]
    plain = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    penalized = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, repetition_penalty=1.3)
    rounds = [[plain] * 7, [plain] * 3 + [penalized] + [plain] * 3, [plain] * 7]
    on_cpu, on_gpu = (engine_of(folder, device, 256) for device in ("cpu", "cuda:0"))
    assert on_gpu._runner.launcher is not None
    on_gpu._runner.launcher.warm_up(decodes=True)
    for number, params in enumerate(rounds):
        wanted, found = (engine.generate(prompts, params) for engine in (on_cpu, on_gpu))
        for n in range(7):
            check_tokens(found[n].tokens, wanted[n].tokens, f"round {number}, request {n}")
