"""The doctor's section on fetching or computing: what a conductor measured, else this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from moonpool.base.cluster import (
    CONDUCTOR_SERVICE,
    PrefillSample,
    PullSample,
    RegisterWorker,
    ReportWorker,
    WorkerInfo,
    WorkerLoad,
    WorkerRole,
)
from moonpool.base.rpc import AsyncClient
from moonpool.base.run_dirs import socket_address
from moonpool.cli.doctor_crossover import by_conductor, by_gpu, by_machine, check_crossover
from moonpool.cli.doctor_gpu import GpuSpeed
from moonpool.conductor.messages import ConductorStatus, FetchOrCompute, PredictionError
from moonpool.conductor.service import Conductor, ConductorConfig


def status(**fields: Any) -> ConductorStatus:
    return ConductorStatus(workers=(), pool_blocks=0, pool_connected=True, counters={}, **fields)


def measured(min_tokens: int | None, num_pulls: int = 5) -> FetchOrCompute:
    return FetchOrCompute(
        min_tokens=min_tokens,
        at_tokens=8192,
        computed_tokens_s=35_000.0,
        pulled_tokens_s=380_000.0,
        break_even_nbytes_s=2e9,
        measured_nbytes_s=5e9,
        num_prefills=9,
        num_pulls=num_pulls,
    )


def test_what_a_conductor_measured() -> None:
    ttft = PredictionError(model="ttft", count=3, p50=0.08, p90=0.2, bias=0.0)
    says = by_conductor(measured(100), status(predictions=(ttft,))).says
    assert says.startswith(
        "pulling beats computing for prefixes from 100 tokens on: at 8,192 tokens the workers compute 35,000 tokens/s "
        "and pull 380,000 tokens/s (5 GB/s); below 2 GB/s computing would be faster"
    )
    assert says.endswith("TTFT is predicted within 8% (median)")
    assert "computing beats pulling for every prefix" in by_conductor(measured(None), status()).says
    assert "nothing was pulled yet" in by_conductor(measured(100, num_pulls=0), status()).says


@pytest.mark.parametrize(
    ("copy_nbytes_s", "verdict"),
    [
        (55e9, "for an 8B model (Llama 3) pulling beats computing at any length"),
        (1.5e9, "for an 8B model (Llama 3) computing beats pulling up to 107,"),
    ],
)
def test_what_a_gpu_does(copy_nbytes_s: float, verdict: str) -> None:
    says = by_gpu(GpuSpeed(name="H200", flops=780e12, copy_nbytes_s=copy_nbytes_s)).says
    assert says.startswith("H200 computes 780 TFLOP/s")
    assert verdict in says


@pytest.mark.parametrize(("copy_nbytes_s", "verdict"), [(1e10, "worth fetching"), (1e6, "faster to compute")])
def test_what_this_machine_does(copy_nbytes_s: float, verdict: str) -> None:
    assert by_machine(50e9, copy_nbytes_s).says.endswith(verdict)


def test_without_a_service_the_machine_is_measured(tmp_path: Path) -> None:
    (found,) = check_crossover([tmp_path])  # nobody listens there
    assert found.ok
    assert "GFLOP/s" in found.says


async def test_a_running_conductor_is_asked(tmp_path: Path) -> None:
    conductor = Conductor(ConductorConfig(address=socket_address(tmp_path, "conductor")))
    worker = await AsyncClient.connect(await conductor.start(), CONDUCTOR_SERVICE)
    info = WorkerInfo(
        name="p0",
        role=WorkerRole.PREFILL,
        address="unix:/run/p0.sock",
        incarnation=1,
        identity=b"\1" * 32,
        model="tiny",
        block_tokens=64,
        num_pages=1000,
        max_num_seqs=8,
        page_nbytes=1 << 20,
    )
    prefills = tuple(PrefillSample(tokens, 0, tokens * 1e-3) for tokens in (100, 1000, 5000))
    pulls = tuple(PullSample(nbytes, nbytes / 1e9) for nbytes in (1 << 20, 1 << 24, 1 << 27))
    report = ReportWorker(
        name="p0", incarnation=1, sequence=1, load=WorkerLoad(free_pages=9), prefills=prefills, pulls=pulls
    )
    await worker.call(RegisterWorker(info))
    await worker.call(report)
    (found,) = await asyncio.to_thread(check_crossover, [tmp_path])
    assert "pulling beats computing for prefixes from" in found.says
    worker.close()
    await conductor.close()
