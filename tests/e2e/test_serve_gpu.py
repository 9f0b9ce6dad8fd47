"""`moonpool serve` with all workers on one GPU (`pytest -m gpu`): equal pages on every way; kills leave nothing."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator

import pytest
from e2e_service import Service, keys_of, running
from random_model import small_model, token_prompt
from waiting import wait_until

from moonpool.base.errors import MoonpoolError, NotFound
from moonpool.frontend import attempt
from moonpool.transfer.transports.cuda.driver import driver
from moonpool.worker.messages import Prefill

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
NUM_KILLS = 4


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("gpu")
    options = ("--model", str(small_model(folder / "small")), "--random-weights", "--device", "cuda", "--prefill", "2")
    with running(folder, *options, "--dtype", "float32", "--kv", "64MB", "--dram", "256MB") as service:
        yield service


def checksums(service: Service, tokens: list[int]) -> dict[str, list[bytes | None]]:
    """Of each worker, those of the prompt's full blocks that it holds."""
    found: dict[str, list[bytes | None]] = {}
    for worker in ("prefill-0", "prefill-1", "decode-0"):
        found[worker] = []
        for key in keys_of(tokens):
            try:
                found[worker].append(service.piece_checksums(worker, key))
            except NotFound:
                found[worker].append(None)
    return found


def test_pages_are_equal_in_all_workers_and_after_the_pool(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = token_prompt(1000)
    answer = service.generate(prompt)
    assert answer.prefill is not None
    assert answer.prefill.pool_tokens == 0
    before = checksums(service, prompt)
    assert sum(sums.count(None) == 0 for sums in before.values()) == 2, "a prefill worker, and the decode worker"
    (pieces,) = {tuple(sums) for sums in before.values() if None not in sums}
    for name in ("prefill-0", "prefill-1"):
        service.kill_and_wait_back(name)
    # Computing is faster for this model, but the pool is asked here whatever it costs.
    monkeypatch.setattr(attempt, "Prefill", lambda **fields: Prefill(**{**fields, "max_pool_blocks": None}))
    again = service.generate(prompt)
    assert again.tokens == answer.tokens
    assert again.prefill is not None
    assert again.prefill.pool_tokens >= 14 * 64, "read from the pool"
    after = checksums(service, prompt)
    held = [sums for name, sums in after.items() if name != "decode-0" and None not in sums[:14]]
    assert held
    assert all(tuple(sums[:14]) == pieces[:14] for sums in held)


def test_workers_killed_in_mid_transfer_leave_nothing(service: Service) -> None:
    rng = random.Random(5)
    assert service.run_dir.is_dir()  # looked up while decode-0 is there, and remembered
    gpu = driver().device(0)
    gpu.free_nbytes()  # makes this process's own context

    def generate(seed: int) -> None:
        with contextlib.suppress(MoonpoolError, ExceptionGroup):  # its worker was killed too often
            service.generate(token_prompt(3000, seed=seed))

    before = 0
    for number in range(2 + NUM_KILLS):
        users = [threading.Thread(target=generate, args=[10 * number + n]) for n in range(3)]
        for user in users:
            user.start()
        time.sleep(rng.uniform(0.0, 0.15))
        service.kill_and_wait_back(("prefill-0", "decode-0")[number % 2])
        for user in users:
            user.join(120)
        assert service.generate(token_prompt(700, seed=number)).tokens
        if number == 1:  # both were started with all kernels compiled: their successors take as much memory
            before = gpu.free_nbytes()
    wait_until(lambda: gpu.free_nbytes() >= before - (256 << 20), "the GPU has its memory back")
