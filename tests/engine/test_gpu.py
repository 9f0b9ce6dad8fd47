"""On a machine with a CUDA device, `pytest -m gpu`: bytes come back equal, and tokens are those of the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moonpool.engine.config import EngineConfig, ModelConfig
from moonpool.engine.engine import Engine
from moonpool.engine.kv_tensor import KvMemory
from moonpool.engine.llama import LlamaModel
from moonpool.engine.load import kv_layout, make_scheduler
from moonpool.engine.runner import Runner
from moonpool.engine.sequence import SamplingParams
from moonpool.engine.weights import random_weights

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TINY = ModelConfig(
    architecture="llama", vocab_size=512, hidden_size=128, intermediate_size=256, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=32, max_position=2048, rms_norm_eps=1e-5, rope_theta=10_000.0,
)  # fmt: skip


def engine_on(device: str) -> Engine:
    config = EngineConfig(num_pages=64, block_tokens=16, max_batch_tokens=64, device=device)  # type: ignore[arg-type]
    weights = random_weights(TINY, dtype="float32", device="cpu", seed=3)
    moved = _to_device(weights, device)
    return Engine(
        make_scheduler(TINY, config),
        Runner(LlamaModel(TINY, moved), KvMemory(kv_layout(TINY, config), device=config.device)),
    )


def _to_device(weights: object, device: str) -> object:
    """The same numbers on another device: dataclasses of tensors, tuples of such, or a tensor."""
    if isinstance(weights, torch.Tensor):
        return weights.to(device)
    if isinstance(weights, tuple):
        return tuple(_to_device(item, device) for item in weights)
    if weights is None:
        return None
    fields = {name: _to_device(getattr(weights, name), device) for name in weights.__dataclass_fields__}  # type: ignore[attr-defined]
    return type(weights)(**fields)


def test_tokens_equal_those_of_the_cpu() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = [[(7 * i + n) % 512 for i in range(5 + 37 * n)] for n in range(5)]
    params = SamplingParams(max_tokens=24, temperature=0.0)
    answers = [[g.tokens for g in engine_on(device).generate(prompts, params)] for device in ("cpu", "cuda")]
    assert answers[0] == answers[1]


def test_kv_goes_through_the_pool_to_another_process_and_back() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "gpu_smoke.py"
    done = subprocess.run(
        [sys.executable, str(script), "--json"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    results = {line["case"]: line["value"] for line in map(json.loads, done.stdout.splitlines())}
    assert results["bytes equal after the round trip"] == 1.0
