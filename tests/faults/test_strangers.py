"""Strangers send bodies, headers and frames of every kind to every port of a running service.

No process of the service may end, no handler may fail by a bug, a well-behaved client beside them gets the right
answers, and what they began is given up. In the long runs, in addition, no process grows by more than 64 MB, and the
client's p95 latency is within 2x + 50 ms of its undisturbed one. Undisturbed and disturbed rounds take turns there (the
attacker is stopped and continued), so that other load of the machine meets both alike; the attackers take processor
time of their own, at the lowest priority, which is why a run on a busy machine may miss the bound.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from e2e_service import Service, running
from random_model import small_model
from severe import check_tokens
from strangers import Targets
from waiting import HANG_S, wait_until

ATTACKS_PER_S = 40
NUM_ATTACKS = 300  # of a short run, in all
ROUND_S = 3.0  # of either kind
MAX_GROWTH_NBYTES = 64 * 1000**2
PORTS = ("http", "store", "conductor", "worker", "memory")
PROMPTS = [f"Count from {first} to ten: {first}," for first in ("one", "two", "three", "four")]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("strangers")
    with running(folder, "--model", str(small_model(folder / "small")), "--random-weights") as service:
        yield service


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """With the default model and its latencies."""
    with running(tmp_path_factory.mktemp("strangers")) as service:
        yield service


@contextlib.contextmanager
def tcp_node(service: Service, folder: Path) -> Iterator[str]:
    """Where a second node, of the kind that several machines have, serves its memory over tcp."""
    secret, log_path = folder / "secret", folder / "log"
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    options = ("--name", "node-tcp", "--run-dir", str(service.run_dir), "--master", service.address("master"),
               "--dram", "16MB", "--tcp-host", "127.0.0.1", "--secret-file", str(secret))  # fmt: skip
    with log_path.open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "moonpool", "node", *options], stdout=log, stderr=log)
    try:
        wait_until(lambda: "tcp 127.0.0.1:" in log_path.read_text(), "the second node has mounted its memory")
        yield "127.0.0.1:" + log_path.read_text().partition("tcp 127.0.0.1:")[2].split()[0]
        assert process.poll() is None, log_path.read_text()
    finally:
        process.terminate()
        process.wait(HANG_S)


def targets_of(service: Service, tcp: str, ports: tuple[str, ...]) -> Targets:
    """The addresses behind the names in `ports`."""
    run_dir = service.run_dir
    known = {f"{name}.sock" for name in ("master", "conductor", "prefill-0", "decode-0")} | {
        "node.sess",
        "node-tcp.sess",
    }
    shm = [str(path) for path in run_dir.iterdir() if path.is_socket() and path.name not in known]
    assert shm, "the sockets that hand out memory"
    every: dict[str, dict[str, Any]] = {
        "http": {"http": service.url.removeprefix("http://")},
        "store": {"store": [str(run_dir / "master.sock")]},
        "conductor": {"conductor": [str(run_dir / "conductor.sock")]},
        "worker": {"worker": [str(run_dir / f"{name}.sock") for name in ("prefill-0", "decode-0")]},
        "memory": {"shm": shm, "node": [str(run_dir / "node.sess")], "tcp": [tcp]},
    }
    return Targets(service.model, **{field: value for port in ports for field, value in every[port].items()})


class Attacker:
    """The program strangers.py; with a count it ends by itself."""

    def __init__(self, seed: int, targets: Targets, log: Path, count: int | None = None) -> None:
        program = Path(__file__).parent / "strangers.py"
        words = [sys.executable, str(program), str(seed), str(ATTACKS_PER_S), msgspec.json.encode(targets).decode()]
        self._log = log
        with log.open("w") as sink:
            self._process = subprocess.Popen(
                [*words, *([] if count is None else [str(count)])], stdout=sink, stderr=sink
            )

    def is_running(self) -> bool:
        """Fails the test if it has ended by a bug of its own."""
        assert self._process.poll() in (None, 0), self._log.read_text()
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def continue_(self) -> None:
        assert self._process.poll() is None, self._log.read_text()
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class GoodClient:
    """Asks the same few questions again and again and remembers how long each took."""

    def __init__(self, service: Service) -> None:
        self._http, self._model = httpx.Client(base_url=service.url, timeout=HANG_S), service.model
        self._right = [self._ask(prompt) for prompt in PROMPTS]

    def _ask(self, prompt: str) -> str:
        body = {"model": self._model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
        reply = self._http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        text: str = reply.json()["choices"][0]["text"]
        return text

    def ask_for(self, seconds: float) -> list[float]:
        """Returns the latencies of all requests begun within that time. A wrong or failed answer fails the test."""
        taken_s, end_s = list[float](), time.monotonic() + seconds
        while time.monotonic() < end_s:
            taken_s += self.ask_all()
        return taken_s

    def ask_all(self) -> list[float]:
        """Ask each question once. Return the latencies."""
        taken_s = []
        for prompt, right in zip(PROMPTS, self._right, strict=True):
            began_s = time.monotonic()
            check_tokens(self._ask(prompt), right)
            taken_s.append(time.monotonic() - began_s)
        return taken_s

    def close(self) -> None:
        self._http.close()


def p95(values_s: list[float]) -> float:
    return statistics.quantiles(values_s, n=20)[-1]


def own_nbytes(service: Service) -> dict[str, int]:
    """Return the anonymous memory of each process. The pool and the KV pages are shared memory of a fixed size, which
    is touched bit by bit; it is not counted.
    """
    return {f"{name_of(process)} {process.pid}": _anonymous_nbytes(process.pid) for process in service.family()}


def _anonymous_nbytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    [kib] = [line.split()[1] for line in lines if line.startswith("Anonymous:")]
    return int(kib) * 1024


def name_of(process: psutil.Process) -> str:
    words = process.cmdline()
    return words[words.index("--name") + 1] if "--name" in words else " ".join(words[2:4])


def pids(service: Service) -> set[int]:
    return {process.pid for process in service.family()}


def check_unharmed(service: Service, before: set[int]) -> None:
    assert pids(service) == before, f"a process ended:\n{service.log()}"
    assert "bug in" not in service.log(), service.log()
    wait_until(lambda: _nothing_held(service), "what strangers began is given up")


def _nothing_held(service: Service) -> bool:
    stats = [service.stats(name) for name in ("prefill-0", "decode-0")]
    return all((s.reserved_pages, s.num_waiting, s.num_running) == (0, 0, 0) for s in stats)


def test_strangers_at_every_port(service: Service, tmp_path: Path) -> None:
    seed = int(os.environ.get("MOONPOOL_FUZZ_SEED", "11"))
    with tcp_node(service, tmp_path) as tcp, contextlib.closing(GoodClient(service)) as client:
        before, targets = pids(service), targets_of(service, tcp, PORTS)
        with contextlib.closing(Attacker(seed, targets, tmp_path / "attacker.log", NUM_ATTACKS)) as strangers:
            while strangers.is_running():
                client.ask_all()
        check_unharmed(service, before)


def attack_for(service: Service, ports: tuple[str, ...], seconds: float, seed: int, folder: Path) -> None:
    """Attack in rounds, and compare with undisturbed rounds: one before every four attacks."""
    quiet_s, disturbed_s = list[float](), list[float]()
    log = folder / "attacker.log"
    with tcp_node(service, folder) as tcp, contextlib.closing(GoodClient(service)) as client:
        quiet_s += client.ask_for(ROUND_S)
        before = own_nbytes(service)
        with contextlib.closing(Attacker(seed, targets_of(service, tcp, ports), log)) as strangers:
            strangers.stop()
            for index in range(round(seconds / ROUND_S)):
                quiet_s += client.ask_for(ROUND_S) if index % 4 == 0 else []
                strangers.continue_()
                disturbed_s += client.ask_for(ROUND_S)
                strangers.stop()
        after = own_nbytes(service)
    grown = {name: after[name] - before[name] for name in before.keys() & after.keys()}
    print(f"seed {seed}: p95 {p95(disturbed_s):.3f} s, undisturbed {p95(quiet_s):.3f} s; grown by, in bytes: {grown}")
    assert after.keys() == before.keys(), f"a process ended:\n{service.log()}"
    check_unharmed(service, pids(service))
    assert all(nbytes < MAX_GROWTH_NBYTES for nbytes in grown.values()), grown
    assert p95(disturbed_s) <= 2 * p95(quiet_s) + 0.05


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ports", [PORTS, *((port,) for port in PORTS)], ids=lambda ports: "-".join(ports))
def test_strangers_for_long(smollm2: Service, tmp_path: Path, ports: tuple[str, ...]) -> None:
    attack_for(smollm2, ports, 600, time.time_ns() & 0xFFFFFFFF, tmp_path)
