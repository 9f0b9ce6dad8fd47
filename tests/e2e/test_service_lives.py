"""Two lives of a service on one folder, with random weights. Its settings come from a file, from the environment and
from the command line; Ctrl-C ends the first life, the second begins with the same keys and ends with its launcher."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from e2e_service import BLOCK_TOKENS, Service, running
from random_model import small_model, token_prompt
from waiting import HANG_S, wait_until

from moonpool.base.rpc import AsyncClient
from moonpool.base.run_dirs import live_run_dirs, read_url
from moonpool.store.messages import SERVICE as STORE
from moonpool.store.messages import Subscribe

FILE = """
[serve]
model = "{model}"
random_weights = true
port = 1                  # the command line says 0: any free port
dram = "77TB"             # the environment says less
kv = "64MB"
[worker]
report_interval_s = 0.06
[conductor]
policy_tie_slack = 0.06
"""


def options_of(service: Service, role: str) -> dict[str, str]:
    """Each word of the role's command line with the one after it: options with their values."""
    return dict(pairwise(service.role(role).cmdline()))


def test_two_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "moonpool.toml"
    file.write_text(FILE.format(model=small_model(tmp_path / "small")))
    monkeypatch.setenv("MOONPOOL_DRAM", "64MB")
    monkeypatch.setenv("MOONPOOL_LISTEN", "nonsense")  # the launcher sets it for each role
    with running(tmp_path, "-c", str(file)) as service:
        check_settings(service)
        check_answers(service)
        first_keys = keys_of_a_text(service)
        check_ctrl_c_leaves_nothing_behind(service)
    with running(tmp_path, "-c", str(file)) as service:
        # The tenants' secrets are on disk: the same text leads to the same blocks, under the same keys.
        assert keys_of_a_text(service) == first_keys
        check_it_survives_the_loss_of_its_run_directory(service)
        family = service.family()
        service.process.kill()
        _, alive = psutil.wait_procs(family, timeout=HANG_S)
        assert not alive, "a role goes on without its launcher"


def check_settings(service: Service) -> None:
    assert options_of(service, "node")["--dram"] == "64000000"
    worker = options_of(service, "prefill-0")
    assert (worker["--kv"], worker["--report-interval-s"]) == ("64000000", "0.06")
    assert options_of(service, "conductor")["--policy-tie-slack"] == "0.06"


def check_answers(service: Service) -> None:
    """Tokens are streamed one by one, and computed once."""
    body = {"model": "small", "prompt": token_prompt(300), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    events = list(service.stream("/v1/completions", body))
    text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
    assert text
    assert len([event for event in events if event["choices"]]) > 1, "tokens are streamed one by one"
    again = httpx.post(f"{service.url}/v1/completions", json=body, timeout=HANG_S).json()
    assert again["choices"][0]["text"] == text
    assert again["usage"]["prompt_tokens"] == 300
    first, second = (service.generate(token_prompt(200, seed=2)) for _ in range(2))
    assert first.tokens == second.tokens
    assert second.prefill is not None
    assert second.prefill.local_tokens + second.prefill.pool_tokens == 192


def keys_of_a_text(service: Service) -> set[bytes]:
    """Ask about a text. Return the keys of its blocks: those that have come into the pool."""
    text = "The lighthouse keeper wrote down every ship that passed, its flag and its heading. " * 12
    before = stored_keys(service)
    body = {"model": "small", "prompt": text, "max_tokens": 2, "stream_options": {"include_usage": True}}
    *_, last = service.stream("/v1/completions", body)
    num_blocks = last["usage"]["prompt_tokens"] // BLOCK_TOKENS
    assert num_blocks > 1
    wait_until(lambda: len(stored_keys(service) - before) >= num_blocks, "the pool has all blocks")
    return stored_keys(service) - before


def stored_keys(service: Service) -> set[bytes]:
    """All keys in the pool, from the master's own event stream."""

    async def read() -> set[bytes]:
        client = await AsyncClient.connect(service.address("master"), STORE)
        keys: set[bytes] = set()
        async for batch in client.stream(Subscribe()):
            keys.update(batch.stored)
            if batch.snapshot:
                break
        client.close()
        return keys

    return asyncio.run(read())


def check_it_survives_the_loss_of_its_run_directory(service: Service) -> None:
    """The directory is removed, and a worker dies. The new worker could reach no other role; all are started again with
    new sockets, and the same request is answered as before."""
    prompt = token_prompt(200, seed=3)
    before, run_dir = service.generate(prompt).tokens, service.run_dir
    shutil.rmtree(run_dir)
    service.role("prefill-0").kill()
    lines = [f"{run_dir} was removed; it is made again"]
    for role, socket in (("master", "master.sock"), ("node", "node.sess"), ("conductor", "conductor.sock")):
        lines.append(f"the socket {run_dir / socket} was removed or replaced")
        lines.append(f"{role} ended (a socket of it was removed or replaced); starting it again in 0.2 s")
    for line in lines:
        wait_until(lambda line=line: line in service.log(), line)  # type: ignore[misc]
    wait_until(lambda: service.role_pid("conductor"), "the conductor is started again")
    wait_until(lambda: health(service)["missing"] == [], "all roles are back")
    assert service.generate(prompt).tokens == before
    assert run_dir in live_run_dirs(run_dir.parent)
    assert read_url(run_dir) == service.url


def health(service: Service) -> dict[str, Any]:
    return dict(httpx.get(f"{service.url}/health", timeout=HANG_S).json())


def check_ctrl_c_leaves_nothing_behind(service: Service) -> None:
    run_dir, family = service.run_dir, service.family()
    assert len(family) >= 6
    os.kill(service.process.pid, signal.SIGINT)
    service.process.wait(HANG_S)
    assert not [process for process in family if process.is_running()]
    assert not run_dir.exists()
