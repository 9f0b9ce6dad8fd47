"""A real `moonpool serve` for tests: its processes, its URL, and direct calls to its roles."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import psutil
from severe import check_no_process
from waiting import HANG_S, wait_until

from moonpool.base.cluster import CONDUCTOR_SERVICE, WORKER_SERVICE
from moonpool.base.keys import chain_keys
from moonpool.base.rpc import BlockingClient, Call
from moonpool.conductor.messages import ConductorStatus, DecisionRecord, Records, Status
from moonpool.conductor.retries import RetryPolicy
from moonpool.engine.sequence import SamplingParams
from moonpool.frontend.choice import ChoiceRequest, ChoiceRunner
from moonpool.frontend.workers import Connections
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.worker.messages import GetStats, PieceChecksums, PrefillReply, WorkerStats

R = TypeVar("R")
ROOT = bytes(range(32))  # of a tenant that only tests have
BLOCK_TOKENS = 64


# Of the services of tests. A host that takes processors away must not decide whether blocks are reused: no master
# counts as away, no pull is given up for computing, and no engine counts as hanging. Several services fit into the
# machine's memory. Workers measure little when they start, because no test depends on what is predicted.
_SETTINGS = {
    "MOONPOOL_POOL_SILENCE_S": "60",
    "MOONPOOL_PULL_GRACE_S": "60",
    "MOONPOOL_POOL_TIMEOUT_S": "60",
    "MOONPOOL_PULL_TIMEOUT_S": "60",
    "MOONPOOL_STEP_LIMIT_S": "600",
    "MOONPOOL_CALIBRATE_S": "0.2",
    "MOONPOOL_KV": "64MB",
    "MOONPOOL_DRAM": "64MB",
}


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    prefill: PrefillReply | None = None
    ttft_s: float = 0.0
    num_attempts: int = 0
    request_id: str = ""


class BrokenStreamError(AssertionError):
    """A stream ended without an error and without [DONE]: a client would take a part for the whole answer."""


class Service:
    """Started by its constructor, stopped by `stop()`; use `running(...)`. `model` is the name that requests give."""

    def __init__(self, state_dir: Path, *options: str) -> None:
        self.started_s = time.monotonic()
        self.model = Path(options[options.index("--model") + 1]).name if "--model" in options else "smollm2"
        env = {**_SETTINGS, **os.environ, "MOONPOOL_STATE": str(state_dir)}
        command = [sys.executable, "-m", "moonpool", "serve", "--port", "0", *options]
        self._log = (state_dir / f"serve-{time.time_ns()}.log").open("w+")
        self.process = subprocess.Popen(
            command, env=env, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.url = ""
        self.ready_after_s = 0.0

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, f"serve ended with {self.process.returncode}:\n{self.log()}"
            return re.search(r"serves \S+ at (http\S+)/v1", self.log()) is not None

        wait_until(is_ready, "the service is ready")
        match = re.search(r"serves \S+ at (http\S+)/v1", self.log())
        assert match is not None
        self.url = match[1]
        wait_until(self._healthy, "the service is healthy")
        self.ready_after_s = time.monotonic() - self.started_s

    def _healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health").status_code == 200
        return False

    def stop(self, signum: int = signal.SIGINT, timeout_s: float = HANG_S) -> None:
        """Ends it and makes sure that nothing is left. Idempotent."""
        if self._log.closed:
            return
        family = self.family()
        if self.process.poll() is None:
            os.kill(self.process.pid, signum)
        try:
            self.process.wait(timeout_s)
            _, alive = psutil.wait_procs(family, timeout=timeout_s)
        finally:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait()
            self._log.close()
        check_no_process(alive)

    # -- its processes ---------------------------------------------------------------------------------------

    def family(self) -> list[psutil.Process]:
        """The launcher's descendants."""
        with contextlib.suppress(psutil.NoSuchProcess):
            found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
            return found
        return []

    def role(self, name: str) -> psutil.Process:
        """The process of one role, e.g. "prefill-0"."""
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                words = process.cmdline()
                is_named = "--name" in words
                if (("--name", name) if is_named else ("moonpool", name)) in itertools.pairwise(words):
                    return process
        raise AssertionError(f"no process is {name}")

    def role_pid(self, name: str) -> int | None:
        """None while no process has that role: one that was killed may go between two looks."""
        try:
            return int(self.role(name).pid)
        except (AssertionError, psutil.NoSuchProcess):
            return None

    @functools.cached_property
    def run_dir(self) -> Path:
        """The folder of its sockets; it stays the same when a role is killed and started again."""
        words = self.role("decode-0").cmdline()
        return Path(words[words.index("--run-dir") + 1])

    def store(self) -> Store:
        """Return a client of the pool that waits for a busy master, where a worker would go on without the pool."""
        return Store(self.address("master"), config=ClientConfig(name="test", retry_s=HANG_S, silence_s=HANG_S))

    def address(self, name: str) -> str:
        return f"unix:{self.run_dir / name}.sock"

    def kill_and_wait_back(self, name: str) -> None:
        """kill -9, then wait until the conductor knows its successor."""
        before = self.worker_incarnation(name)
        self.role(name).kill()

        def is_back() -> bool:
            return self.worker_incarnation(name) not in (None, before)

        wait_until(is_back, f"{name} is back")

    def worker_incarnation(self, name: str) -> int | None:
        workers = {w.info.name: w.info.incarnation for w in self.status().workers}
        return workers.get(name)

    # -- its roles, directly -----------------------------------------------------------------------------------

    def ask(self, address: str, service: str, call: Call[R]) -> R:
        client = BlockingClient(address, service, name="test")
        try:
            return client.call(call, timeout_s=HANG_S)
        finally:
            client.close()

    def status(self) -> ConductorStatus:
        return self.ask(self.address("conductor"), CONDUCTOR_SERVICE, Status())

    def records(self, request_id: str) -> list[DecisionRecord]:
        """Return the attempts at this request, the last one last."""
        found = self.ask(self.address("conductor"), CONDUCTOR_SERVICE, Records())
        return [each for each in found if each.request_id == request_id]

    def stats(self, worker: str) -> WorkerStats:
        return self.ask(self.address(worker), WORKER_SERVICE, GetStats())

    def piece_checksums(self, worker: str, key: bytes) -> bytes:
        return self.ask(self.address(worker), WORKER_SERVICE, PieceChecksums(key=key))

    def generate(self, prompt: list[int], max_tokens: int = 16, **params: Any) -> Answer:
        """One request past HTTP: tokens in, tokens out."""
        return self.generate_all([prompt], max_tokens, **params)[0]

    def generate_all(self, prompts: list[list[int]], max_tokens: int = 16, **params: Any) -> list[Answer]:
        """All at once."""
        settings = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **params})
        return _run(_generate_all(self.address("conductor"), prompts, settings))

    # -- its front end -------------------------------------------------------------------------------------------

    def raw_request(self, path: str, body: dict[str, Any]) -> socket.socket:
        """Send a request; return its connection, for clients that leave without reading an answer."""
        host, port = urlsplit(self.url).netloc.split(":")
        connection = socket.create_connection((host, int(port)))
        text = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(text)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + text)
        return connection

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """Yield the events of a streamed answer. Raise BrokenStreamError if [DONE] or an error is not the last thing
        that came."""
        last = ""
        with httpx.stream("POST", f"{self.url}{path}", json={**body, "stream": True}, timeout=HANG_S) as reply:
            assert reply.status_code == 200, reply.read()
            for line in filter(None, reply.iter_lines()):
                if last == "data: [DONE]":
                    raise BrokenStreamError(f"after [DONE] came {line!r}")
                last = line
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))
        if last != "data: [DONE]" and not last.startswith('data: {"error"'):
            raise BrokenStreamError(f"the last event is {last!r}")


def _run(work: Coroutine[Any, Any, R]) -> R:
    return asyncio.run(work)


async def _generate_all(address: str, prompts: list[list[int]], params: SamplingParams) -> list[Answer]:
    connections = Connections(address)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_generate(connections, prompt, params)) for prompt in prompts]
        return [task.result() for task in tasks]
    finally:
        await connections.close()


async def _generate(connections: Connections, prompt: list[int], params: SamplingParams) -> Answer:
    request = ChoiceRequest(f"e2e-{os.urandom(6).hex()}", prompt, ROOT, BLOCK_TOKENS, params, timeout_s=HANG_S)
    generation = ChoiceRunner(request, connections, RetryPolicy())
    answer = Answer(request_id=request.request_id)
    started_s = time.monotonic()
    async with contextlib.aclosing(generation.batches()) as batches:
        async for batch in batches:
            if not answer.tokens:
                answer.ttft_s = time.monotonic() - started_s
            answer.tokens += [out.token for out in batch.tokens]
            answer.finish_reason = batch.finish_reason
            answer.prefill = answer.prefill or batch.prefill
    answer.num_attempts = generation.num_attempts
    return answer


@contextlib.contextmanager
def running(state_dir: Path, *options: str) -> Iterator[Service]:
    service = Service(state_dir, *options)
    try:
        service.wait_ready()
        yield service
    finally:
        service.stop()


def keys_of(tokens: list[int]) -> list[bytes]:
    return chain_keys(ROOT, tokens, BLOCK_TOKENS)
