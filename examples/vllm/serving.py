"""What both examples share: the pool's processes, vLLM servers, requests to them, and their own counts of hits."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.integrations.mooncake import shadow_path

NUM_PROMPT_TOKENS = 2000
_START_S = 600.0  # a large model takes its time


@dataclass(frozen=True)
class Completion:
    text: str
    loaded: int  # tokens of the prompt that came through the connector, by vLLM's own count
    seconds: float


class Server:
    """One vLLM server."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, port: int, model: str) -> None:
        self._process = process
        self._log = log
        self._url = f"http://127.0.0.1:{port}"
        self._model = model

    def wait_ready(self) -> None:
        end = time.monotonic() + _START_S
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"vLLM did not start:\n{self._log.read_text()[-4000:]}")
            time.sleep(0.2)

    def complete(self, prompt: list[int], num_tokens: int, transfer: dict[str, Any] | None = None) -> Completion:
        """`transfer` are vLLM's kv_transfer_params."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if transfer is not None:
            body["kv_transfer_params"] = transfer
        before, began = self._loaded_so_far(), time.monotonic()
        request = urllib.request.Request(
            self._url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_START_S) as reply:
            text = json.load(reply)["choices"][0]["text"]
        return Completion(text, self._loaded_so_far() - before, time.monotonic() - began)

    def _loaded_so_far(self) -> int:
        return int(metric(self._url + "/metrics", "vllm:external_prefix_cache_hits_total"))

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(self._url + "/health", timeout=5):
                return True
        except OSError:
            return False


@contextmanager
def vllm_server(
    log: Path, model: str, config: dict[str, Any], env: dict[str, str], options: list[str]
) -> Iterator[Server]:
    """Start a server that finds Moonpool as `mooncake`. `config` is its --kv-transfer-config."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--kv-transfer-config", json.dumps(config), *options]
    path = [shadow_path(), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    with running(command, {"PYTHONPATH": os.pathsep.join(filter(None, path)), **env}, log) as process:
        yield Server(process, log, port, model)


@contextmanager
def running(command: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with this block, and its children too."""
    with open(log, "wb") as file:
        process = subprocess.Popen(command, env=os.environ | env, stdout=file, stderr=file, start_new_session=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):  # its group has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def metric(url: str, name: str) -> float:
    """Return the sum of a Prometheus metric over its labels."""
    with urllib.request.urlopen(url, timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{")))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def random_prompt() -> list[int]:
    """Token ids that every model has, and that no cache has seen."""
    rng = random.SystemRandom()
    return [rng.randrange(100, 400) for _ in range(NUM_PROMPT_TOKENS)]


def report(name: str, completion: Completion) -> None:
    share = 100 * completion.loaded / NUM_PROMPT_TOKENS
    print(
        f"{name}: loaded {completion.loaded} of {NUM_PROMPT_TOKENS} tokens ({share:.0f} %), {completion.seconds:.2f} s"
    )
