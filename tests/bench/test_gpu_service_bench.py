"""The service that the GPU benchmarks start, with the small model on the CPU: requests, a restart, conversations."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
pytest.importorskip("torch")

from _gpu_lab import prompt
from _gpu_service import serving
from gpu_serve import Workload, converse

ON_CPU = ("--device", "cpu", "--dtype", "float32", "--max-model-len", "4000", "--kv", "128MB", "--dram", "256MB")
NUM_IDS = 1700


@pytest.mark.soak  # the GPU benchmarks' own service; reuse across a restart is shown by tests/e2e/test_pool_reuse.py
def test_requests_a_restart_and_conversations() -> None:
    one = prompt(1000, 1, NUM_IDS)
    with serving(*ON_CPU, shape="small") as service:
        first = service.ask(one, max_tokens=4)
        assert 0 < first.ttft_s <= first.seconds
        assert first.cached_tokens == 0
        service.settle()
        assert service.compute_s(prompt(200, 2, NUM_IDS)) > 0
        service.restart("prefill-0", settle_s=0.0)
        again = service.ask(one, max_tokens=4)
        assert again.token_ids == first.token_ids
        assert again.cached_tokens > 0, "the pool has the whole blocks"
        turns = asyncio.run(converse(service.url, Workload.make(4, 2, (256, 64, 8), num_ids=NUM_IDS)))
        assert len(turns) == 8
        assert sum(answer.cached_tokens for _, answer in turns) > 0
