"""On a GPU, `pytest -m gpu`: a kernel that does not end is noticed where the engine's thread waits for it, and the
worker is replaced: at a prefill worker in a step, at a decode worker without one in the check of a hand-off. The kernel
comes by a signal (hang_site/sitecustomize.py)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from e2e_service import running
from random_model import small_model, token_prompt
from severe import check_tokens
from waiting import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
SPIN = signal.SIGRTMIN + 1
HANGS = "the engine's thread hangs, so this process ends: "


@pytest.mark.parametrize(("name", "waits"), [("prefill-0", "a step of "), ("decode-0", "a posted function")])
def test_a_worker_whose_kernel_spins_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, waits: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "hang_site"), prepend=os.pathsep)
    monkeypatch.setenv("MOONPOOL_STEP_LIMIT_S", "6")
    monkeypatch.setenv("MOONPOOL_PREPARE_LIMIT_S", "30")
    options = ("--model", str(small_model(tmp_path / "small")), "--random-weights", "--device", "cuda")
    roles = ("--prefill", "2", "--decode", "2", "--dtype", "float32", "--kv", "64MB", "--dram", "256MB")
    with running(tmp_path, *options, *roles) as service:
        prompts = [token_prompt(200, seed) for seed in range(8)]
        expected = [service.generate(prompt).tokens for prompt in prompts]
        assert "the engine's thread" not in service.log(), "starting, compiling and first steps are no hang"
        worker = service.role(name)
        worker.send_signal(SPIN)
        wait_until(lambda: "a test lets a kernel spin" in service.log(), "the kernel runs")
        check_tokens([service.generate(prompt).tokens for prompt in prompts], expected)
        wait_until(lambda: service.role_pid(name) not in (None, worker.pid), "it is replaced")
        assert HANGS + waits in service.log()
        assert "its engine hung" in service.log(), "the launcher"
        wait_until(lambda: service.worker_incarnation(name) is not None, "it is back")
        check_tokens([service.generate(prompt).tokens for prompt in prompts], expected)
