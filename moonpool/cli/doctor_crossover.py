"""Whether KV should be fetched or computed here, as measured by a running conductor, or else by a short measurement of
this machine. Takes a fraction of a second; imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moonpool.base.errors import MoonpoolError
from moonpool.base.run_dirs import CONDUCTOR, live_run_dirs, socket_address
from moonpool.base.units import format_nbytes
from moonpool.cli.pool import ask_conductor
from moonpool.conductor.crossover import break_even_bandwidth
from moonpool.conductor.messages import ConductorStatus, FetchOrCompute, Status
from moonpool.transfer.doctor import Finding

# The default model, SmolLM2-135M, in float32: 9 heads of 64 share 3 heads of KV.
_WIDTH, _GQA, _ELEMENT_NBYTES, _PREFIX_TOKENS = 576, 3, 4, 1024
_MEASURE_S = 0.05


def check_crossover(run_dirs: list[Path] | None = None) -> list[Finding]:
    """Return one finding per service that runs here; without a service, one about the machine."""
    found = []
    for run_dir in live_run_dirs() if run_dirs is None else run_dirs:
        status = _ask(socket_address(run_dir, CONDUCTOR))
        if status is not None and status.fetch_or_compute is not None:
            found.append(by_conductor(status.fetch_or_compute, status))
    return found or [by_machine(measure_flops(), measure_copy_nbytes_s())]


def by_conductor(found: FetchOrCompute, status: ConductorStatus) -> Finding:
    """Return the conductor's measurement, or that it has measured nothing yet."""
    if not found.num_prefills or not found.num_pulls:
        says = "nothing was pulled yet: the pool is always used" if found.num_prefills else "nothing measured"
        return Finding(name="crossover", status="ok", says=says)
    rates = f"the pool delivers {_rate(found.measured_nbytes_s)}"
    if found.min_tokens is None:
        says = f"{rates}; computing is faster for every prefix"
    else:
        need = f"{found.at_tokens:,} need {_rate(found.break_even_nbytes_s)}"
        says = f"prefixes from {found.min_tokens:,} tokens on are worth fetching: {rates}, {need}"
    errors = {one.model: one for one in status.predictions if one.count}
    if "ttft" in errors:
        says += f"; TTFT is predicted within {errors['ttft'].p50:.0%} (median)"
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
