"""On a GPU, `pytest -m gpu`: workers are killed in the middle of transfers. Nothing stays behind on the GPU or in the
shared memory of the machine, and the next request is answered as before.

Twenty times, for `-m soak`; the short form is in test_serve_gpu.py.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from e2e_service import Service, running
from random_model import small_model, token_prompt

from moonpool.launch.checks import free_device_nbytes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
SLACK_NBYTES = 300_000_000  # the driver keeps some memory for itself; one worker takes far more
PROMPT = token_prompt(3000)


def free_nbytes() -> int:
    """Return what is free on the GPU; it takes the driver a moment to notice the end of a process."""
    return free_device_nbytes(["cuda:0"])["cuda:0"]


def settled_free_nbytes(at_least: int, timeout_s: float = 20.0) -> int:
    deadline = time.monotonic() + timeout_s
    while (free := free_nbytes()) < at_least and time.monotonic() < deadline:
        time.sleep(0.5)
    return free


def answer(service: Service, prompt: list[int]) -> str:
    body = {"model": "small", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{service.url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def send(service: Service, prompt: list[int]) -> None:
    """Send a request whose worker is about to be killed: it may succeed, by another attempt, or fail."""
    body = {"model": "small", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    httpx.post(f"{service.url}/v1/completions", json=body, timeout=120)


def kill_in_mid_transfer(service: Service, worker: str, seed: int, after_s: float) -> None:
    prompts = [token_prompt(3500, 10 * seed + number) for number in range(4)]
    threads = [threading.Thread(target=send, args=(service, prompt)) for prompt in prompts]
    for thread in threads:
        thread.start()
    time.sleep(after_s)
    service.kill_and_wait_back(worker)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a request hangs"


def kill_rounds(tmp_path: Path, rounds: int) -> None:
    folder = small_model(tmp_path / "small")
    options = ("--model", str(folder), "--random-weights", "--device", "cuda", "--dtype", "bfloat16")
    limits = ("--kv", "256MB", "--dram", "1GB", "--max-num-seqs", "4", "--max-batch-tokens", "1024")
    before, shared = free_nbytes(), psutil.virtual_memory().shared
    rng = random.Random(5)
    with running(tmp_path, *options, *limits) as service:
        expected = answer(service, PROMPT)
        running_free = free_nbytes()
        for number in range(rounds):
            worker = ("prefill-0", "decode-0")[number % 2]
            kill_in_mid_transfer(service, worker, number + 1, rng.uniform(0.0, 0.15))
            assert answer(service, PROMPT) == expected
        assert settled_free_nbytes(running_free - SLACK_NBYTES) >= running_free - SLACK_NBYTES
    assert settled_free_nbytes(before - SLACK_NBYTES) >= before - SLACK_NBYTES
    assert psutil.virtual_memory().shared <= shared + SLACK_NBYTES


@pytest.mark.soak
def test_twenty_kills(tmp_path: Path) -> None:
    kill_rounds(tmp_path, 20)
