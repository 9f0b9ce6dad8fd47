"""The front end alone: how many requests one core answers when its workers answer at once. Needs `wrk` and two cores.

    python benchmarks/frontend.py --json

The front end, the process that `moonpool frontend` starts, keeps to one core. On the other are `wrk` and one process
with the real conductor and two workers that speak the real protocol and answer at once (_instant_workers.py). Requests
are chats and completions in turns, half of them streamed: a prompt of about 60 words, an answer of 8 tokens, the first
in the prefill worker's message and the others in one message of the decode worker. The tokenizer and the chat template
are SmolLM2's.

The baseline, measured in the same run on the same core: a bare ASGI app under uvicorn that reads each body and sends
an answer of the same size. `cpu per request` is the front end's own processor time, which other load on the machine
changes little; its inverse is what a core could answer at most. Latency is measured by `wrk` from the request's first
byte to the answer's last, at about `--rate` requests per second, conductor and workers included.

`relay` is the bare app once more, which also exchanges the messages of a request with the conductor and the workers:
the same prompt each time, whose tokens and keys are known from the start. What the front end takes longer than the
relay, at the same rate, is what it adds itself (`added`): checks, templates, tokens to text and back, records, metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
from _instant_workers import InstantCluster
from _live_load import free_port, process_cpu_s, wait

from moonpool.base.clock import Deadline
from moonpool.base.keys import chain_keys
from moonpool.bench.report import BenchReport, bench_parser
from moonpool.conductor.messages import PrefillEnded, RequestEnded, Route
from moonpool.engine.sequence import SamplingParams
from moonpool.frontend.attempt import Attempt
from moonpool.frontend.workers import Connections
from moonpool.worker.messages import RequestSpec

MODEL = "smollm2"
_TEXT = (
    "The master keeps the place of every object of the pool, grants space to clients that write, and tells nodes which "
    "objects to copy, to move to disk or to drop. Explain in a few sentences what happens to a reader whose node is "
    "lost while the reader copies a block, and how long the reader may have to wait for its bytes."
)
_SCRIPT = """
local bodies, paths, number = {}, {}, 0
function init(args)
  for line in io.lines(args[1]) do
    local path, body = line:match("^(%S+) (.*)$")
    paths[#paths + 1], bodies[#bodies + 1] = path, body
  end
  pause = tonumber(args[2])
  math.randomseed(os.time())
end
function request()
  number = number % #bodies + 1
  return wrk.format("POST", paths[number], {["content-type"] = "application/json"}, bodies[number])
end
PACING
function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format('\\n{"requests": %d, "seconds": %f, "errors": %d, "p50_ms": %f, "p99_ms": %f}\\n',
    summary.requests, summary.duration / 1e6,
    errors.connect + errors.read + errors.write + errors.status + errors.timeout,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
"""
_PACING = "function delay() return math.random() * 2 * pause end"


class Load(NamedTuple):
    """What `wrk` measured, and the server's processor time."""

    rate: float  # requests per second
    p50_ms: float
    p99_ms: float
    cpu_us: float  # per request


def bodies() -> list[tuple[str, bytes]]:
    """Return the paths and bodies of the requests that clients send in turns."""
    common = {"model": MODEL, "max_tokens": 8, "temperature": 0.7, "top_p": 0.95, "seed": 1}
    messages = [{"role": "system", "content": "You answer briefly."}, {"role": "user", "content": _TEXT}]
    chat, completion = {**common, "messages": messages}, {**common, "prompt": _TEXT}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return [
        (path, json.dumps({**body, **extra}).encode())
        for extra in ({}, streamed)
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", completion))
    ]


class Wrk:
    """Runs `wrk` on a core against one server at a time."""

    def __init__(self, folder: Path, core: int) -> None:
        self._prefix = ("taskset", "-c", str(core), "wrk")
        self._bodies = folder / "bodies"
        self._bodies.write_bytes(b"".join(path.encode() + b" " + body + b"\n" for path, body in bodies()))
        self._flat_out, self._paced = folder / "flat_out.lua", folder / "paced.lua"
        self._flat_out.write_text(_SCRIPT.replace("PACING", ""))
        self._paced.write_text(_SCRIPT.replace("PACING", _PACING))

    def flat_out(self, server: Server, seconds: float, connections: int = 16) -> Load:
        return self._run(server, self._flat_out, seconds, connections, 0.0)

    def paced(self, server: Server, seconds: float, rate: float, connections: int = 32) -> Load:
        """Send about `rate` requests per second. Each connection pauses at random between an answer and its next
        request, so that requests do not come in step."""
        return self._run(server, self._paced, seconds, connections, 1e3 * connections / rate)

    def _run(self, server: Server, script: Path, seconds: float, connections: int, pause_ms: float) -> Load:
        limits = ("-t1", f"-c{connections}", f"-d{seconds:.0f}s", "--timeout", "10s", "-s", str(script))
        before_s = process_cpu_s(server.pid)
        found = subprocess.run(
            [*self._prefix, *limits, server.url, "--", str(self._bodies), str(pause_ms)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            timeout=seconds + 30,
        )
        used_s = process_cpu_s(server.pid) - before_s
        seen = json.loads(found.stdout.strip().splitlines()[-1])
        if seen["errors"] or not seen["requests"]:
            raise SystemExit(f"{seen['errors']} of {seen['requests']} requests failed")
        return Load(seen["requests"] / seen["seconds"], seen["p50_ms"], seen["p99_ms"], 1e6 * used_s / seen["requests"])


class Server(NamedTuple):
    url: str
    pid: int


@contextlib.contextmanager
def front_end(folder: Path, conductor_address: str, core: int, *more_options: str) -> Iterator[Server]:
    port = free_port()
    options = ("--conductor-address", conductor_address, "--state-dir", str(folder), "--model", MODEL)
    listen = ("--model-name", MODEL, "--listen", f"tcp:127.0.0.1:{port}", "--log-level", "ERROR")
    command = [sys.executable, "-m", "moonpool", "frontend", *options, *listen, *more_options]
    with _process(command, core, f"http://127.0.0.1:{port}") as server:
        wait(lambda: httpx.get(f"{server.url}/health").is_success, "the front end")
        yield server


@contextlib.contextmanager
def helper_server(core: int, kind: str, *arguments: object) -> Iterator[Server]:
    port = free_port()
    command = [sys.executable, __file__, kind, str(port), *map(str, arguments)]
    with _process(command, core, f"http://127.0.0.1:{port}") as server:
        wait(lambda: httpx.post(server.url).is_success, "the baseline")
        yield server


@contextlib.contextmanager
def _process(command: Sequence[str], core: int, url: str) -> Iterator[Server]:
    process = subprocess.Popen(["taskset", "-c", str(core), *command])
    try:
        yield Server(url, process.pid)
    finally:
        process.terminate()
        process.wait(20)


def helper_main(port: str, nbytes: str, conductor_address: str | None = None) -> None:
    """Serve an app that reads each body and answers with `nbytes` bytes, as a relay if there is a conductor."""
    import uvicorn

    answer, relay = bytes(int(nbytes)), None if conductor_address is None else Relay(conductor_address)
    headers = [(b"content-type", b"application/json"), (b"content-length", nbytes.encode())]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body", False):
            pass
        if relay is not None:
            await relay.exchange()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    uvicorn.run(app, port=int(port), http="httptools", loop="uvloop", lifespan="off", log_level="error")


class Relay:
    """Exchanges a request's messages with the conductor and the workers, and does nothing else."""

    def __init__(self, conductor_address: str) -> None:
        self._connections = Connections(conductor_address)
        self._number = 0
        root = bytes(32)
        tokens = list(range(1000, 1096))
        self._keys = chain_keys(root, tokens, 16)
        self._spec = RequestSpec(
            request_id="",
            epoch=0,
            tokens=tokens,
            num_prompt_tokens=len(tokens),
            root=root,
            params=SamplingParams(max_tokens=8),
            timeout_s=60.0,
        )

    async def exchange(self) -> None:
        self._number += 1
        spec = msgspec.structs.replace(self._spec, request_id=f"relay-{self._number}")
        conductor = await self._connections.conductor()
        route = Route(request_id=spec.request_id, keys=self._keys, num_tokens=len(spec.tokens), max_tokens=8)
        decision = await conductor.call(route, timeout_s=60.0)
        num_tokens = 0
        async with contextlib.aclosing(Attempt(self._connections, decision, spec, Deadline(60.0)).batches()) as batches:
            async for batch in batches:
                num_tokens += len(batch.tokens)
                if batch.prefill is not None:
                    self._connections.notify_conductor(PrefillEnded(request_id=spec.request_id))
        ended = RequestEnded(
            request_id=spec.request_id,
            ttft_s=0.0,
            cached_tokens=0,
            pool_tokens=0,
            output_tokens=num_tokens,
            outcome="done",
        )
        self._connections.notify_conductor(ended)


async def _answer_nbytes(url: str) -> int:
    """Return the mean size of the answers; check that they are whole."""
    async with httpx.AsyncClient(base_url=url) as client:
        answers = [await client.post(path, content=body) for path, body in bodies()]
    for answer in answers:
        if answer.status_code != 200 or '"completion_tokens":8' not in answer.text:
            raise SystemExit(f"the front end answered {answer.status_code}: {answer.text}")
    return sum(len(answer.content) for answer in answers) // len(answers)


def measure(options: argparse.Namespace) -> Iterator[tuple[str, float, str, float | None]]:
    """Yield case, value, unit and the baseline's value."""
    cores = sorted(os.sched_getaffinity(0))
    own, others = cores[0], cores[1]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        cluster = stack.enter_context(InstantCluster(folder, prefix=("taskset", "-c", str(others))))
        server = stack.enter_context(front_end(folder, cluster.conductor_address, own))
        nbytes = asyncio.run(_answer_nbytes(server.url))
        bare = stack.enter_context(helper_server(own, "--as-bare", nbytes))
        relay = stack.enter_context(helper_server(own, "--as-relay", nbytes, cluster.conductor_address))
        wrk = Wrk(folder, others)
        wrk.flat_out(server, 2)
        loads = [(wrk.flat_out(server, options.seconds), wrk.flat_out(bare, options.seconds)) for _ in range(3)]
        best, best_bare = (max(column) for column in zip(*loads, strict=True))
        yield "requests", best.rate, "1/s", best_bare.rate
        yield "cpu per request", best.cpu_us, "us", best_bare.cpu_us
        rounds = [[wrk.paced(each, options.seconds, options.rate) for each in (server, relay, bare)] for _ in range(3)]
        for name, at in (("p50", 1), ("p99", 2)):
            paced, through, alone = (sorted(load[at] for load in column)[1] for column in zip(*rounds, strict=True))
            yield f"{name} at {options.rate:.0f} requests/s", paced, "ms", alone
            yield f"{name} of the relay", through, "ms", alone
            yield f"{name} added", paced - through, "ms", None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each of the measurements")
    parser.add_argument("--rate", type=float, default=400.0, help="requests per second while latency is measured")
    options = parser.parse_args(arguments)
    if shutil.which("wrk") is None or len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("this needs the program `wrk` (apt install wrk) and two cores")
    report = BenchReport.from_options("frontend", options)
    for case, value, unit, baseline in measure(options):
        report.add(case, value, unit, baseline)


if __name__ == "__main__":
    if sys.argv[1:2] in (["--as-bare"], ["--as-relay"]):
        helper_main(*sys.argv[2:])
    else:
        main()
