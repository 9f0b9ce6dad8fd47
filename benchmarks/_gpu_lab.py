"""What the GPU benchmarks share: the 8B shape, an engine with random weights, the machine's own speeds, output.

Every line is {"bench", "case", "value", "unit", "baseline", "ratio", ...}; `ratio` is value / baseline, both measured
in this run. `target` is what the case must reach, `ok` whether it does.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _random_model import write_model

from moonpool.engine.config import EngineConfig, ModelConfig
from moonpool.engine.engine import Engine, StepFailure, StepLink
from moonpool.engine.load import load_runner, make_scheduler
from moonpool.engine.model_files import read_config, resolve
from moonpool.engine.sequence import SamplingParams

MODEL = ModelConfig(
    architecture="llama", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32,
    num_heads=32, num_kv_heads=8, head_dim=128, max_position=131_072, rms_norm_eps=1e-5, rope_theta=500_000.0,
)  # fmt: skip
BLOCK_TOKENS = 64
TOKEN_NBYTES = 131_072  # KV of one token
NUM_PARAMETERS = 8.03e9
_EMBEDDING = 128_256 * 4096
MAX_LEN = 40_000
CHUNK = 8192


def prompt(num_tokens: int, seed: int, num_ids: int = 100_000) -> list[int]:
    """Return token ids that no other seed has."""
    return [(i * 7919 + seed * 104_729) % num_ids + 300 for i in range(num_tokens)]


def fastest_s(work: Callable[[], object], repeats: int = 3) -> float:
    """Return the time of the fastest run, after one that does not count; each ends when the device is done."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started_s)
    return min(times[1:])


def hbm_nbytes_s() -> float:
    """Return how fast the device's memory is copied: bytes read plus bytes written per second."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / fastest_s(lambda: target.copy_(source))


def matmul_flops() -> float:
    """Return the speed of a large matrix product in bfloat16."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / fastest_s(lambda: left @ right, repeats=10)


def prefill_flop(num_tokens: int, prefix: int = 0) -> float:
    """Return the operations of a prefill: dense ones per token, and attention with a causal mask."""
    dense = 2 * (NUM_PARAMETERS - 2 * _EMBEDDING) * (num_tokens - prefix)
    return dense + 4 * 32 * 4096 * (num_tokens**2 - prefix**2) / 2


def decode_nbytes(num_seqs: int, context: float) -> float:
    """Return the bytes that a decode step must read: all weights but the embedding, and the KV of all sequences."""
    return 2 * (NUM_PARAMETERS - _EMBEDDING) + num_seqs * context * TOKEN_NBYTES


def make_engine(
    num_pages: int,
    max_num_seqs: int = 64,
    shape: str = "8b",
    *,
    step_tokens: int = CHUNK,
    link: StepLink | None = None,
) -> Engine:
    """Return an engine with random weights of a shape of _random_model.py, warmed up; its memory is free again when the
    last reference is gone."""
    gc.collect()
    torch.cuda.empty_cache()
    config = EngineConfig(
        num_pages=num_pages,
        block_tokens=BLOCK_TOKENS,
        max_batch_tokens=step_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_LEN,
        dtype="bfloat16",
        device="cuda",
    )
    with tempfile.TemporaryDirectory() as folder:
        files = resolve(str(write_model(Path(folder) / shape, shape)), random_weights=True)
        model = read_config(files)
        runner = load_runner(files, model, config)
    runner.warm_up()
    return Engine(make_scheduler(model, config), runner, link)


def release() -> None:
    """Give unused memory back to the device, for other processes."""
    gc.collect()
    torch.cuda.empty_cache()


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def start_decoding(engine: Engine, num_seqs: int, context: int, max_tokens: int) -> None:
    """Add the sequences and compute their prompts; the next steps decode all of them."""
    for number in range(num_seqs):
        engine.add_request(f"d{number}", prompt(context, 1000 * num_seqs + number), greedy(max_tokens))
    started: set[str] = set()
    while len(started) < num_seqs:
        started |= {out.request_id for out in checked(engine.step())}


def step_ms(engine: Engine, num_steps: int) -> float:
    """Return the mean time of decode steps, with all that Engine.step() does."""
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(num_steps):
        checked(engine.step())
    torch.cuda.synchronize()
    return (time.perf_counter() - started_s) / num_steps * 1e3


def end_decoding(engine: Engine, num_seqs: int) -> None:
    for number in range(num_seqs):
        engine.cancel(f"d{number}")
    while engine.has_work():
        engine.step()


def checked(outputs: Sequence[Any]) -> Sequence[Any]:
    """Return the outputs. Raise the error of a request that failed."""
    for out in outputs:
        if isinstance(out, StepFailure):
            raise out.error
    return outputs
