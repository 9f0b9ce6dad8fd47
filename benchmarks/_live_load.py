"""What benchmarks of the live service share: a random llama, the service as processes, a client that notes times."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from moonpool.base.limits import available_cores
from moonpool.base.run_dirs import CONDUCTOR
from moonpool.launch.child import to_arguments
from moonpool.launch.machine import FRONTEND
from moonpool.launch.plan import Role, ServeConfig, plan_machine, plan_roles

VOCAB = 2000
START_S = 120.0
_TIMEOUT_S = 120.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def llama(hidden: int, intermediate: int, num_layers: int = 8) -> dict[str, int]:
    """The sizes of one, as its config.json has them."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
    }


def save_model(folder: Path, shape: Mapping[str, int]) -> None:
    """Weights do not matter, their number does."""
    import tokenizers
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig.from_dict(dict(shape))
    make: Any = LlamaForCausalLM
    make(config).to(torch.float32).save_pretrained(folder)
    words = {f"t{number}": number for number in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))


class Service:
    """The roles of `moonpool serve` as processes of this one, so that the conductor alone can be replaced. `pins` are
    the cores that workers keep to, by their names; `worker` is what Python runs as a worker."""

    def __init__(
        self,
        folder: Path,
        shape: Mapping[str, int] | str,
        pins: Mapping[str, int] | None = None,
        worker: Sequence[str] = ("-m", "moonpool", "worker"),
        **options: Any,
    ) -> None:
        """`shape` is that of a random llama, or the name of a model."""
        self._pins, self._worker = pins or {}, worker
        model = shape if isinstance(shape, str) else str(folder / "model")
        if not isinstance(shape, str):
            save_model(Path(model), shape)
        self.config = ServeConfig(
            model=model, threads=1, host="127.0.0.1", port=free_port(), log_level="ERROR", **options
        )
        machine = plan_machine(self.config, num_cores=available_cores())
        self._roles = {role.name: role for role in plan_roles(self.config, machine, folder, folder)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = f"http://127.0.0.1:{self.config.port}"

    @property
    def conductor_address(self) -> str:
        return str(self._roles[CONDUCTOR].options["address"])

    def start(self) -> None:
        for role in self._roles.values():
            self._start(role, {})

    def use(self, policy: str) -> None:
        """With a conductor that has learnt nothing yet but what the workers measured at their start."""
        self._stop(CONDUCTOR)
        self._start(self._roles[CONDUCTOR], {"policy_name": policy})
        self.wait_ready()

    def wait_ready(self) -> None:
        def all_there() -> bool:
            page = httpx.get(f"{self.url}/metrics", timeout=10).text
            return page.count("moonpool_conductor_assigned{") >= self.config.num_workers

        wait(all_there, "the workers to register")

    def cpu_s(self) -> float:
        """Processor time that all its processes have had so far."""
        return sum(process_cpu_s(process.pid) for process in self._processes.values())

    def pids(self) -> dict[str, int]:
        """Return the processes of the roles, by their names."""
        return {name: process.pid for name, process in self._processes.items()}

    def close(self) -> None:
        for name in (FRONTEND, *self._roles):
            self._stop(name)

    def _start(self, role: Role, changes: dict[str, object]) -> None:
        arguments = to_arguments({**role.options, **changes})
        program = self._worker if role.command == "worker" else ("-m", "moonpool", role.command)
        command = [sys.executable, *program, *arguments]
        with _on_core(self._pins.get(role.name)):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._processes[role.name] = process
        if role.name in (CONDUCTOR, "master", "node"):
            wait(lambda: _listens(role), f"{role.name} to start")

    def _stop(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            process.terminate()
            process.wait(20)


@contextlib.contextmanager
def _on_core(core: int | None) -> Iterator[None]:
    """Processes started within keep to it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Quiet:
    """How many cores' time others take meanwhile, at normal priority: what runs at a lower one only gets the rest."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._began_s, self._others_s = time.perf_counter(), self._used_by_others_s()

    def others(self) -> float:
        return (self._used_by_others_s() - self._others_s) / (time.perf_counter() - self._began_s)

    def _used_by_others_s(self) -> float:
        user, _, system = map(int, Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
        return (user + system) / _TICKS_PER_S - self._service.cpu_s() - time.process_time()


def process_cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / _TICKS_PER_S


def _listens(role: Role) -> bool:
    address = str(role.options.get("address") or role.options.get("listen") or "")
    return not address or Path(address.removeprefix("unix:")).exists()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait(holds: Callable[[], bool], what: str) -> None:
    ends_s = time.monotonic() + START_S
    while time.monotonic() < ends_s:
        try:
            if holds():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"waited {START_S:.0f} s for {what}")


class RefusedAnswer(Exception):
    """The service is overloaded (429)."""


class Answer(NamedTuple):
    """When its client sent the request and got each token, by the clock of `time.perf_counter`, and the events."""

    sent_s: float
    token_s: list[float]
    events: list[bytes]

    @property
    def text(self) -> str:
        return "".join(json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in self.events)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def mean_gap_s(self) -> float:
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [later - sooner for sooner, later in itertools.pairwise(self.token_s)]


async def ask(url: str, prompt: Sequence[int], num_output: int, key: str = "", priority: int = 0) -> Answer:
    """One streamed completion, over a connection of its own, read with as little work per token as can be: whatever
    the client computes is taken from the workers' two cores. Raise RefusedAnswer on 429."""
    body = json.dumps({
        "model": "model", "prompt": prompt, "max_tokens": num_output, "temperature": 0, "ignore_eos": True,
        "stream": True, "priority": priority,
    }).encode()  # fmt: skip
    headers = ["host: moonpool", "content-type: application/json", f"content-length: {len(body)}", "connection: close"]
    if key:
        headers.append(f"authorization: Bearer {key}")
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *headers, "\r\n"))
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    sent_s = time.perf_counter()
    try:
        writer.write(head.encode() + body)
        async with asyncio.timeout(_TIMEOUT_S):
            return Answer(sent_s, *await _tokens(reader, num_output))
    finally:
        writer.close()


async def _tokens(reader: asyncio.StreamReader, num_output: int) -> tuple[list[float], list[bytes]]:
    """Return when each token came, and the events; they are decoded later."""
    status = await reader.readline()
    if b" 429 " in status:
        raise RefusedAnswer
    if b" 200 " not in status:
        raise SystemExit(f"the service answered {status.decode().strip()}: {(await reader.read()).decode()}")
    times: list[float] = []
    events: list[bytes] = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
            events.append(line)
    if len(times) != num_output:
        raise SystemExit(f"{num_output} tokens were asked for, {len(times)} came")
    return times, events
