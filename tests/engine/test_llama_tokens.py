"""The model computes what transformers computes: same greedy tokens, alone, in chunks and in mixed batches."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tiny_models import BLOCK_TOKENS, CONFIGS, greedy, greedy_by_transformers, load_runner, save_tiny

from moonpool.engine.runner import Runner
from moonpool.engine.sequence import Chunk, pages_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Pair = tuple["PreTrainedModel", Runner]


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    before = os.environ.get("MOONPOOL_CACHE")
    os.environ["MOONPOOL_CACHE"] = str(folder / "cache")
    try:
        yield save_tiny(request.param, folder / "model", shards=True), load_runner(folder / "model")
    finally:
        if before is None:
            del os.environ["MOONPOOL_CACHE"]
        else:
            os.environ["MOONPOOL_CACHE"] = before


def _prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 211), k=length)


def _pages(runner: Runner, num_tokens: int, seed: int = 0) -> list[int]:
    pages = random.Random(seed).sample(range(runner.kv.layout.num_pages), pages_for(num_tokens, BLOCK_TOKENS))
    runner.kv.tensor[pages] = float("nan")  # what an earlier user left must not matter
    return pages


@pytest.mark.parametrize("length", [1, 2, 16, 17, 100, 700])
def test_same_tokens_as_transformers(pair: Pair, length: int) -> None:
    reference, runner = pair
    prompt = _prompt(length)
    expected = greedy_by_transformers(reference, prompt, 12)
    assert greedy(runner, prompt, 12, _pages(runner, length + 12)) == expected


@pytest.mark.parametrize("chunk", [1, 3, 16, 50])
def test_chunked_prefill_gives_the_same_kv_and_tokens(pair: Pair, chunk: int) -> None:
    _, runner = pair
    prompt = _prompt(90)
    whole, parts = _pages(runner, 100, seed=1)[:6], None
    expected = greedy(runner, prompt, 8, [*whole, 250])
    parts = [page for page in range(200, 249) if page not in whole][:7]
    assert greedy(runner, prompt, 8, parts, chunk=chunk) == expected
    torch.testing.assert_close(runner.kv.tensor[parts[:5]], runner.kv.tensor[whole[:5]], atol=2e-4, rtol=1e-4)


def test_mixed_batches_equal_sequences_alone(pair: Pair) -> None:
    """Prefill chunks of many sizes and decode rows of many lengths, batched at random."""
    _, runner = pair
    lengths = (1, 5, 14, 30, 33, 64, 150)
    prompts = [_prompt(length, seed=length) for length in lengths]
    num_new = 6
    alone = [greedy(runner, p, num_new, _pages(runner, len(p) + num_new)) for p in prompts]
    assert _run_mixed(runner, prompts, num_new) == alone


def _run_mixed(runner: Runner, prompts: Sequence[Sequence[int]], num_new: int) -> list[list[int]]:
    rng = random.Random(3)
    free = list(range(runner.kv.layout.num_pages))
    rng.shuffle(free)
    tables = [[free.pop() for _ in range(pages_for(len(p) + num_new, BLOCK_TOKENS))] for p in prompts]
    tokens, done = [list(p) for p in prompts], [0] * len(prompts)
    while True:
        active = [i for i, p in enumerate(prompts) if len(tokens[i]) < len(p) + num_new and rng.random() < 0.8]
        if not active:
            if all(len(t) == len(p) + num_new for t, p in zip(tokens, prompts, strict=True)):
                return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]
            continue
        ends = {i: min(len(tokens[i]), done[i] + rng.choice((1, 4, 15, 16, 40, 200))) for i in active}
        chunks = [
            Chunk(str(i), done[i], tuple(tokens[i][done[i] : end]), tuple(tables[i]), end == len(tokens[i]))
            for i, end in ends.items()
        ]
        picked = iter(runner.execute(chunks).argmax(-1).tolist())
        for i, end in ends.items():
            done[i] = end
            if end == len(tokens[i]):
                tokens[i].append(next(picked))


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def before_layer(self, layer: int) -> None:
        self.calls.append(("before", layer))

    def after_layer(self, layer: int) -> None:
        self.calls.append(("after", layer))


def test_hooks_surround_each_layer_and_see_its_kv_written(tmp_path: Path, own_cache: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    runner = load_runner(tmp_path / "model")
    recorder = _Recorder()
    runner.execute([Chunk("r", 0, (5, 6, 7), (3,), False)], recorder)
    assert recorder.calls == [(when, layer) for layer in range(3) for when in ("before", "after")]
    written = runner.kv.tensor[3].abs().sum(dim=(0, 1, 2, 4)).numpy()
    assert np.flatnonzero(written).tolist() == [0, 1, 2]


def test_kv_that_arrives_before_a_layer_is_used_by_it(tmp_path: Path, own_cache: Path) -> None:
    """A page filled inside before_layer counts: this is how pulled KV reaches a running step."""
    save_tiny("llama", tmp_path / "model")
    runner = load_runner(tmp_path / "model")
    prompt = _prompt(40)
    expected = greedy(runner, prompt, 3, [0, 1, 2])
    saved = runner.kv.tensor[[0, 1]].clone()

    class Pull(_Recorder):
        def before_layer(self, layer: int) -> None:
            runner.kv.tensor[10:12, layer] = saved[:, layer]

    runner.kv.tensor[10:12] = float("nan")
    logits = runner.execute([Chunk("r", 32, tuple(prompt[32:]), (10, 11, 12), True)], Pull())
    assert int(logits[0].argmax()) == expected[0]
