"""An engine that hangs in a real service: others answer its requests, its process is replaced, and the log says why. A
slow engine and a stopped process are not ended. Signals make engines sleep (hang_site/sitecustomize.py)."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from e2e_service import Service, running
from random_model import small_model, token_prompt
from severe import check_tokens
from waiting import wait_until

STEP_LIMIT_S = 4.0  # of the service; an engine that is slow sleeps for 1 s
PROMPTS = [token_prompt(100, seed) for seed in range(6)]
SLEEPS = "a test lets the engine sleep"
HANGS = "the engine's thread hangs, so this process ends: a posted function has taken"


def test_a_worker_whose_engine_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "hang_site"), prepend=os.pathsep)
    monkeypatch.setenv("MOONPOOL_STEP_LIMIT_S", str(STEP_LIMIT_S))
    model = small_model(tmp_path / "small")
    with running(tmp_path, "--model", str(model), "--random-weights", "--prefill", "2") as service:
        expected = answers(service)
        worker = service.role("prefill-0")

        worker.send_signal(signal.SIGUSR1)
        check_tokens(answers(service), expected)

        worker.send_signal(signal.SIGUSR1)
        wait_until(lambda: service.log().count(SLEEPS) == 2, "the engine sleeps")
        worker.send_signal(signal.SIGSTOP)
        time.sleep(1.5 * STEP_LIMIT_S)
        worker.send_signal(signal.SIGCONT)
        wait_until(lambda: service.worker_incarnation("prefill-0") is not None, "it is back")
        check_tokens(answers(service), expected)
        assert worker.pid == service.role_pid("prefill-0")
        assert HANGS not in service.log()

        worker.send_signal(signal.SIGUSR2)
        check_tokens(answers(service), expected)  # half of them had been sent there
        wait_until(lambda: service.role_pid("prefill-0") not in (None, worker.pid), "it is replaced")
        wait_until(lambda: service.worker_incarnation("prefill-0") is not None, "and back")
        check_tokens(answers(service), expected)
        log = service.log()
        assert HANGS in log
        assert "in oversleep" in log[log.index(HANGS) :], "where it is"
        assert "its engine hung" in log, "the launcher"


def answers(service: Service) -> list[list[int]]:
    return [answer.tokens for answer in service.generate_all(PROMPTS, max_tokens=4)]
