"""Models without weights: generated from a seed, the same everywhere, and never taken for real ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_model import small_model, token_prompt

from moonpool.base.errors import ModelError
from moonpool.engine.config import EngineConfig
from moonpool.engine.load import load_engine
from moonpool.engine.model_files import cache_identity, read_config, resolve
from moonpool.engine.sequence import SamplingParams
from moonpool.engine.weights import load_weights, random_weights

# Other numbers under the same identity would mix with KV of the earlier ones: change _RANDOM_VERSION with them.
FIRST_QKV_SHA256 = "c832490c9e53b59bce50b67b1eac8217bd145c41b69beb5e3109bfb38acbbb70"


@pytest.fixture
def folder(tmp_path: Path, own_cache: Path) -> Path:
    return small_model(tmp_path / "small")


def test_the_numbers_are_fixed(folder: Path) -> None:
    files = resolve(str(folder), random_weights=True)
    weights = load_weights(files, read_config(files))
    qkv = weights.layers[0].qkv
    assert hashlib.sha256(qkv.numpy().tobytes()).hexdigest() == FIRST_QKV_SHA256
    assert abs(float(qkv.std()) * 512**0.5 - 1) < 0.01
    assert abs(float(qkv.mean())) < 1e-3


def test_tensors_layers_and_seeds_differ(folder: Path) -> None:
    config = read_config(resolve(str(folder)))
    first, other = (random_weights(config, dtype="bfloat16", device="cpu", seed=seed) for seed in (0, 1))
    assert not torch.equal(first.layers[0].qkv, first.layers[1].qkv)
    assert not torch.equal(first.embedding, first.head)
    assert not torch.equal(first.embedding, other.embedding)
    assert torch.equal(first.norm, torch.ones_like(first.norm))


def test_large_tensors_are_generated_in_parts_without_a_seam(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_config(resolve(str(folder)))
    whole = random_weights(config, dtype="float32", device="cpu")
    monkeypatch.setattr("moonpool.engine.weights._RANDOM_AT_ONCE", 1000)
    parts = random_weights(config, dtype="float32", device="cpu")
    assert torch.equal(whole.layers[3].down, parts.layers[3].down)


def test_the_identity_names_seed_and_shape(folder: Path) -> None:
    files = resolve(str(folder), random_weights=True)
    config = read_config(files)
    identity = cache_identity(config, files, "float32", 64)
    assert identity.weights_digest.startswith("random/1/seed=0/")
    wider = replace(config, intermediate_size=2048)  # nothing else of the identity tells them apart
    assert cache_identity(wider, files, "float32", 64).digest() != identity.digest()


def test_without_the_option_the_weights_are_missed(folder: Path) -> None:
    files = resolve(str(folder))
    uses: list[Callable[[], object]] = [
        lambda: cache_identity(read_config(files), files, "float32", 64),
        lambda: _load(folder),
    ]
    for use in uses:
        with pytest.raises(ModelError, match=r"no \.safetensors files; --random-weights"):
            use()


def _load(folder: Path) -> object:
    return load_engine(str(folder), EngineConfig(num_pages=8))


def test_an_engine_answers(folder: Path) -> None:
    engine = load_engine(str(folder), EngineConfig(num_pages=8, threads=1), random_weights=True)
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    answers = engine.generate([token_prompt(5), token_prompt(90, seed=1)], greedy)
    assert [len(answer.tokens) for answer in answers] == [6, 6]
    assert len({token for answer in answers for token in answer.tokens}) > 2
