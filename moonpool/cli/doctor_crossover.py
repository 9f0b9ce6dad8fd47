"""Whether KV should be fetched or computed here, as measured by a running conductor, or else by a short measurement of
this machine. Takes a fraction of a second, some seconds with a GPU; imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moonpool.base.errors import MoonpoolError
from moonpool.base.run_dirs import CONDUCTOR, live_run_dirs, socket_address
from moonpool.base.units import format_nbytes
from moonpool.cli.doctor_gpu import GpuSpeed, measure_gpu
from moonpool.cli.pool import ask_conductor
from moonpool.conductor.crossover import break_even_bandwidth, break_even_tokens
from moonpool.conductor.messages import ConductorStatus, FetchOrCompute, Status
from moonpool.transfer.doctor import Finding

# The default model, SmolLM2-135M, in float32: 9 heads of 64 share 3 heads of KV.
_WIDTH, _GQA, _ELEMENT_NBYTES, _PREFIX_TOKENS = 576, 3, 4, 1024
_MEASURE_S = 0.05
# An 8B Llama 3 in bfloat16: 32 heads of 128 share 8 heads of KV.
_GPU_WIDTH, _GPU_GQA, _GPU_PREFIX_TOKENS = 4096, 4, 8192


def check_crossover(run_dirs: list[Path] | None = None, *, has_gpu: bool = False) -> list[Finding]:
    """Return one finding per service that runs here; without a service, one about the machine and one about its first
    GPU."""
    found = []
    for run_dir in live_run_dirs() if run_dirs is None else run_dirs:
        status = _ask(socket_address(run_dir, CONDUCTOR))
        if status is not None and status.fetch_or_compute is not None:
            found.append(by_conductor(status.fetch_or_compute, status))
    if found:
        return found
    gpu = measure_gpu() if has_gpu else None
    return [by_machine(measure_flops(), measure_copy_nbytes_s()), *([by_gpu(gpu)] if gpu is not None else [])]


def by_conductor(found: FetchOrCompute, status: ConductorStatus) -> Finding:
    """Return the conductor's measurement, or that it has measured nothing yet."""
    if not found.num_prefills or not found.num_pulls:
        says = "nothing was pulled yet: the pool is always used" if found.num_prefills else "nothing measured"
        return Finding(name="crossover", status="ok", says=says)
    rates = (
        f"at {found.at_tokens:,} tokens the workers compute {found.computed_tokens_s:,.0f} tokens/s and pull "
        f"{found.pulled_tokens_s:,.0f} tokens/s ({_rate(found.measured_nbytes_s)})"
    )
    if found.min_tokens is None:
        says = f"computing beats pulling for every prefix, so nothing is pulled: {rates}"
    else:
        need = f"below {_rate(found.break_even_nbytes_s)} computing would be faster"
        says = f"pulling beats computing for prefixes from {found.min_tokens:,} tokens on: {rates}; {need}"
    errors = {one.model: one for one in status.predictions if one.count}
    if "ttft" in errors:
        says += f"; TTFT is predicted within {errors['ttft'].p50:.0%} (median)"
    return Finding(name="crossover", status="ok", says=says)


def by_gpu(found: GpuSpeed) -> Finding:
    """Apply the same formula to a GPU and a model of 8 billion parameters in bfloat16."""
    flops, nbytes_s = found.flops, found.copy_nbytes_s
    least = break_even_tokens(flops, nbytes_s, width=_GPU_WIDTH, gqa=_GPU_GQA)
    need = break_even_bandwidth(flops, _GPU_PREFIX_TOKENS, width=_GPU_WIDTH, gqa=_GPU_GQA)
    verdict = f"computing beats pulling up to {least:,} tokens" if least else "pulling beats computing at any length"
    says = (
        f"{found.name} computes {flops / 1e12:,.0f} TFLOP/s, and memory of this machine is copied to it at "
        f"{_rate(nbytes_s)}; for an 8B model (Llama 3) {verdict}, and a prefix of {_GPU_PREFIX_TOKENS:,} tokens is "
        f"worth pulling above {_rate(need)}"
    )
    return Finding(name="crossover", status="ok", says=says)


def by_machine(flops: float, copy_nbytes_s: float) -> Finding:
    """Apply B/G > 2ds / (gqa (apd + bd^2)) to the measured speed of this machine."""
    need = break_even_bandwidth(flops, _PREFIX_TOKENS, width=_WIDTH, gqa=_GQA, element_nbytes=_ELEMENT_NBYTES)
    verdict = "worth fetching" if copy_nbytes_s > need else "faster to compute"
    says = (
        f"at {flops / 1e9:,.0f} GFLOP/s a prefix of {_PREFIX_TOKENS:,} tokens of the default model is worth fetching"
        f" above {_rate(need)}; memory here copies at {_rate(copy_nbytes_s)}: {verdict}"
    )
    return Finding(name="crossover", status="ok", says=says)


def measure_flops() -> float:
    """Return the speed of a matrix product as large as in a prefill of the default model."""
    left = np.ones((512, _WIDTH), dtype=np.float32)
    right = np.ones((_WIDTH, 4 * _WIDTH), dtype=np.float32)
    return 2.0 * left.shape[0] * right.size / _best_s(lambda: left @ right)


def measure_copy_nbytes_s() -> float:
    source = np.ones(16 * 1024**2, dtype=np.uint8)
    target = np.empty_like(source)
    return source.nbytes / _best_s(lambda: np.copyto(target, source))


def _best_s(work: Callable[[], object]) -> float:
    """Return the time of the fastest run within _MEASURE_S, after one warm-up run."""
    work()
    best_s, ends_s = float("inf"), time.perf_counter() + _MEASURE_S
    while time.perf_counter() < ends_s or best_s == float("inf"):
        started_s = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - started_s)
    return max(best_s, 1e-9)


def _ask(address: str) -> ConductorStatus | None:
    try:
        return ask_conductor(address, Status())
    except MoonpoolError:
        return None  # it is starting or stopping; the machine is measured instead


def _rate(nbytes_s: float) -> str:
    return "no bandwidth" if nbytes_s == float("inf") else f"{format_nbytes(int(nbytes_s))}/s"
