"""A real `moonpool serve` on one GPU for the benchmarks: random 8B weights, its URL, its roles; always stopped.

with serving("--kv", "12GB") as service:
    answer = service.ask(token_ids)
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from _random_model import write_model

from moonpool.base.cluster import CONDUCTOR_SERVICE, WORKER_SERVICE
from moonpool.base.rpc import BlockingClient, Call
from moonpool.conductor.messages import Status
from moonpool.conductor.retries import RetryPolicy
from moonpool.engine.sequence import SamplingParams
from moonpool.frontend.choice import ChoiceRequest, ChoiceRunner
from moonpool.frontend.workers import Connections
from moonpool.worker.messages import GetStats

_START_S = 180.0
_STOP_S = 15.0
_ANSWER_S = 120.0
_ROOT = bytes(range(32))  # of a tenant that only benchmarks have
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG
MODEL_NAME = "llama-8b"
OPTIONS = ("--random-weights", "--dtype", "bfloat16", "--device", "cuda", "--max-model-len", "40000", "--port", "0")


@dataclass(frozen=True)
class Answer:
    ttft_s: float
    seconds: float
    cached_tokens: int
    token_ids: list[int]


class Service:
    """Started by its constructor; close it."""

    def __init__(self, folder: Path, options: tuple[str, ...], shape: str) -> None:
        model = write_model(folder / MODEL_NAME, shape)
        self.log_path, self._folder = folder / "serve.log", folder
        command = [sys.executable, "-m", "moonpool", "serve", "--model", str(model), *OPTIONS, *options]
        env = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "MOONPOOL_STATE": str(folder / "state")}
        with self.log_path.open("w") as log:
            self._process = subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, preexec_fn=end_with_parent
            )
        self.url = ""

    def wait_ready(self) -> None:
        began_s = time.monotonic()
        while not (match := re.search(r"serves \S+ at (http\S+)/v1", self.log())):
            if self._process.poll() is not None or time.monotonic() - began_s > _START_S:
                raise RuntimeError(f"the service did not start:\n{self.log()[-6000:]}")
            time.sleep(0.1)
        self.url = match[1]
        print(f"gpu: service ready after {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def close(self) -> None:
        """Stop all its processes. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # its children notice and end by themselves
                self._process.wait()

    # -- requests ----------------------------------------------------------------------------------------------

    def ask(self, prompt: list[int], max_tokens: int = 2) -> Answer:
        """Send one prompt of token ids over HTTP and stream the answer."""
        return asyncio.run(self._ask(prompt, max_tokens))

    async def _ask(self, prompt: list[int], max_tokens: int) -> Answer:
        async with httpx.AsyncClient(timeout=_ANSWER_S) as client:
            return await stream(client, self.url, prompt, max_tokens)

    def compute_s(self, prompt: list[int]) -> float:
        """Return the time that the prefill worker took for one prompt, its queue and the front end left out."""
        return asyncio.run(self._compute_s(prompt))

    async def _compute_s(self, prompt: list[int]) -> float:
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        request = ChoiceRequest(f"bench-{os.urandom(6).hex()}", prompt, _ROOT, 64, params, timeout_s=_ANSWER_S)
        connections = Connections(self.address("conductor"))
        try:
            async with contextlib.aclosing(ChoiceRunner(request, connections, RetryPolicy()).batches()) as batches:
                return max([batch.prefill.compute_s async for batch in batches if batch.prefill is not None])
        finally:
            await connections.close()

    # -- roles -------------------------------------------------------------------------------------------------

    def address(self, role: str) -> str:
        (run_dir,) = [path for path in self._folder.iterdir() if path.name.startswith("moonpool-")]
        return f"unix:{run_dir / role}.sock"

    def call(self, role: str, call: Call[Any]) -> Any:
        service = CONDUCTOR_SERVICE if role == "conductor" else WORKER_SERVICE
        with contextlib.closing(BlockingClient(self.address(role), service, name="bench")) as client:
            return client.call(call, timeout_s=30)

    def settle(self, worker: str = "prefill-0") -> None:
        """Wait until the worker has written nothing to the pool for a second."""
        written, since_s = -1, time.monotonic()
        while time.monotonic() - since_s < 1.0:
            now = self.call(worker, GetStats()).pool_written_nbytes
            if now != written:
                written, since_s = now, time.monotonic()
            time.sleep(0.1)

    def restart(self, *workers: str, settle_s: float = 8.0) -> None:
        """kill -9; return when the conductor knows their successors, which then have `settle_s` to page-lock the
        pool."""
        before = {worker: self.call(worker, GetStats()) for worker in workers}
        for stats in before.values():
            os.kill(stats.pid, signal.SIGKILL)
        began_s = time.monotonic()
        while any(self._incarnation(worker) in (None, stats.incarnation) for worker, stats in before.items()):
            if time.monotonic() - began_s > _START_S:
                raise RuntimeError(f"{', '.join(workers)} did not come back:\n{self.log()[-6000:]}")
            time.sleep(0.1)
        print(f"gpu: {', '.join(workers)} back after {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)
        time.sleep(settle_s)

    def _incarnation(self, worker: str) -> int | None:
        known = {one.info.name: one.info.incarnation for one in self.call("conductor", Status()).workers}
        return known.get(worker)


async def stream(client: httpx.AsyncClient, url: str, prompt: list[int], max_tokens: int) -> Answer:
    """Send one prompt and read its events; the answer's ids are in its text (_random_model.py)."""
    body = {
        "model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    raw = json.dumps(body, separators=(",", ":")).encode()
    headers = {"content-type": "application/json"}
    began_s, first_s, parts = time.perf_counter(), 0.0, []
    async with client.stream("POST", f"{url}/v1/completions", content=raw, headers=headers) as reply:
        if reply.status_code != 200:
            raise RuntimeError((await reply.aread()).decode())
        async for part in reply.aiter_raw():
            if not first_s and b'"text":' in part:
                first_s = time.perf_counter() - began_s
            parts.append(part)
    seconds = time.perf_counter() - began_s
    lines = b"".join(parts).split(b"\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    text, cached = "", 0
    for event in events:
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        text += "".join(choice["text"] for choice in event["choices"])
        cached = (event.get("usage") or {}).get("prompt_tokens_details", {}).get("cached_tokens", cached)
    return Answer(first_s, seconds, cached, [int(number) for number in re.findall(r"t(\d+);", text)])


@contextlib.contextmanager
def serving(*options: str, shape: str = "8b") -> Iterator[Service]:
    """Start the service with these options beside OPTIONS; stop it at the end, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="mp-", ignore_cleanup_errors=True) as folder:
        service = Service(Path(folder), options, shape)
        try:
            service.wait_ready()
            yield service
        except BaseException:
            print(f"gpu: the service's last words:\n{service.log()[-6000:]}", file=sys.stderr, flush=True)
            raise
        finally:
            service.close()


def end_with_parent() -> None:
    """If the benchmark is killed, the kernel stops this child; a launcher stops its roles."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGTERM)
