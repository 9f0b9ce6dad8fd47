"""What watching costs: requests per second of the front end, and the decode step, with 5 open pages and Prometheus.

    python benchmarks/observe.py --json

Needs `wrk`, `prometheus` and two cores. The pages are five clients that ask what the live page asks: each the status
every second, one of them (at the view of requests) also the newest 1,000 records every 2 s. Prometheus reads /metrics
every 2 s. Both are stopped (SIGSTOP) and continued between measurements, so figures with and without them come in turns
in one run, and the ratio is the median over the turns.

*requests*: the front end has one core to itself; on the other are `wrk`, the real conductor, a master and a node, and
workers that answer at once (benchmarks/frontend.py). *cpu per request* is the front end's processor time, pages and
metrics included. *decode step*: a whole service with a small random model, its decode worker alone on one core, eight
answers at a time; the time is the worker's own (`moonpool_worker_decode_step_seconds`). *cpu per decode step* is the
processor time of the whole worker, what it answers to watchers included; other load on the machine changes it less.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
from _instant_workers import InstantCluster
from _live_load import Service, wait
from _prometheus import running_prometheus
from _random_model import write_model
from frontend import Wrk, front_end

from moonpool.base.cluster import WORKER_SERVICE
from moonpool.base.metrics import GetMetrics
from moonpool.base.rpc import BlockingClient
from moonpool.bench.report import BenchReport, bench_parser

NUM_PAGES, STATUS_S, RECORDS_S, SCRAPE_S = 5, 1.0, 2.0, 2
_NUM_ANSWERS, _ANSWER_TOKENS = 8, 200
_STEP = "moonpool_worker_decode_step_seconds"


class Watchers:
    """The pages and Prometheus, which are stopped at first."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self.watch(False)

    def watch(self, watches: bool) -> None:
        for pid in self._pids:
            os.kill(pid, signal.SIGCONT if watches else signal.SIGSTOP)


@contextlib.contextmanager
def watchers(folder: Path, url: str, core: int) -> Iterator[Watchers]:
    """Start them and wait until they have read once."""
    prefix = ("taskset", "-c", str(core))
    pages = subprocess.Popen([*prefix, sys.executable, __file__, "--as-pages", url], stdout=subprocess.PIPE)
    target = url.removeprefix("http://")
    try:
        with running_prometheus(folder, [target], interval_s=SCRAPE_S, prefix=prefix) as prometheus:
            assert pages.stdout is not None
            pages.stdout.readline()
            wait(lambda: bool(prometheus.query("count(moonpool_missing_roles)")), "Prometheus")
            made = Watchers((pages.pid, prometheus.pid))
            try:
                yield made
            finally:
                made.watch(True)  # a stopped process does not end
    finally:
        pages.terminate()
        pages.wait(20)


async def open_pages(url: str) -> None:
    """Ask as five open pages do, until this process is terminated."""
    is_open = asyncio.Event()

    async def status(client: httpx.AsyncClient) -> None:
        since = 0.0
        while True:
            points = (await client.get("/v1/status", params={"since": since})).json()["history"]["points"]
            since = points[-1][0] if points else since
            is_open.set()
            await asyncio.sleep(STATUS_S)

    async def records(client: httpx.AsyncClient) -> None:
        while True:
            (await client.get("/v1/records", params={"limit": 1000})).raise_for_status()
            await asyncio.sleep(RECORDS_S)

    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for number in range(NUM_PAGES):
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, trust_env=False, timeout=60))
            group.create_task(status(client))
            if number == 0:
                group.create_task(records(client))
        await is_open.wait()
        print("open", flush=True)


class Turn(NamedTuple):
    alone: float
    watched: float


def in_turns(
    number: int, watchers: Watchers, measure: Callable[[], tuple[float, float]]
) -> tuple[list[Turn], list[Turn]]:
    """Measure `number` times each, in the order alone, watched, watched, alone, ... Return the turns of each of the two
    figures that `measure` returns."""
    figures: tuple[list[Turn], list[Turn]] = ([], [])
    for turn in range(number):
        found = {}
        for watches in (False, True) if turn % 2 == 0 else (True, False):
            watchers.watch(watches)
            found[watches] = measure()
        for turns, alone, watched in zip(figures, found[False], found[True], strict=True):
            turns.append(Turn(alone, watched))
    watchers.watch(False)
    return figures


class Case(NamedTuple):
    name: str
    unit: str
    turns: list[Turn]

    def add_to(self, report: BenchReport) -> None:
        """Report the medians, and the median of the turns' ratios."""
        alone, watched = (statistics.median(column) for column in zip(*self.turns, strict=True))
        ratio = statistics.median(turn.watched / turn.alone for turn in self.turns)
        report.add(self.name, watched, self.unit, alone, ratio=ratio, baseline_is="alone")


@contextlib.contextmanager
def pool(folder: Path, core: int) -> Iterator[str]:
    """A master and a node; yields the master's address."""
    master = f"unix:{folder / 'master.sock'}"
    options = {
        "master": ("--data-dir", str(folder / "journal"), "--listen", master),
        "node": ("--name", "node", "--master", master, "--dram", "64MB", "--run-dir", str(folder)),
    }
    with contextlib.ExitStack() as stack:
        for role, words in options.items():
            command = ["taskset", "-c", str(core), sys.executable, "-m", "moonpool", role, *words]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
            wait(lambda: (folder / "master.sock").exists(), "the master")
        yield master


def requests(folder: Path, own: int, others: int, options: argparse.Namespace) -> Iterator[Case]:
    with contextlib.ExitStack() as stack:
        master = stack.enter_context(pool(folder, others))
        cluster = stack.enter_context(InstantCluster(folder, prefix=("taskset", "-c", str(others))))
        more = ("--master-address", master)
        server = stack.enter_context(front_end(folder, cluster.conductor_address, own, *more))
        wrk = Wrk(folder, others)
        wrk.flat_out(server, 2)
        watching = stack.enter_context(watchers(folder, server.url, others))

        def load() -> tuple[float, float]:
            found = wrk.flat_out(server, options.seconds)
            return found.rate, found.cpu_us

        rates, cpu_us = in_turns(options.turns, watching, load)
        yield Case("requests", "1/s", rates)
        yield Case("cpu per request", "us", cpu_us)


def decode_steps(folder: Path, own: int, others: int, options: argparse.Namespace) -> Iterator[Case]:
    model = write_model(folder / "small", "small")
    pins = {"decode-0": own, **dict.fromkeys(("prefill-0", "frontend", "conductor", "master", "node"), others)}
    service = Service(folder, str(model), pins, random_weights=True, kv="64MB", dram="64MB")
    with contextlib.ExitStack() as stack:
        stack.callback(service.close)
        service.start()
        service.wait_ready()
        worker = BlockingClient(f"unix:{folder / 'decode-0.sock'}", WORKER_SERVICE, name="benchmark")
        stack.callback(worker.close)

        def step_ms() -> tuple[float, float]:
            before = _steps(worker)
            asyncio.run(_answers(service.url))
            steps_s, cpu_s, num_steps = (new - old for new, old in zip(_steps(worker), before, strict=True))
            return 1e3 * steps_s / num_steps, 1e3 * cpu_s / num_steps

        step_ms()
        watching = stack.enter_context(watchers(folder, service.url, others))
        steps, cpu_ms = in_turns(options.turns, watching, step_ms)
        yield Case("decode step", "ms", steps)
        yield Case("cpu per decode step", "ms", cpu_ms)


def _steps(worker: BlockingClient) -> tuple[float, float, float]:
    """Return the seconds that all decode steps took, the processor time of the worker, and the number of steps."""
    found = {sample.name: sample.value for each in worker.call(GetMetrics()) for sample in each.samples}
    return found[f"{_STEP}_sum"], found["process_cpu_seconds_total"], found[f"{_STEP}_count"]


async def _answers(url: str) -> None:
    body = {"model": "small", "max_tokens": _ANSWER_TOKENS, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as client:
        prompts = ([300 + number] * 64 for number in range(_NUM_ANSWERS))
        asked = [client.post("/v1/completions", json={**body, "prompt": prompt}) for prompt in prompts]
        for reply in await asyncio.gather(*asked):
            reply.raise_for_status()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each measurement of requests per second")
    parser.add_argument("--turns", type=int, default=20, help="number of measurements with and without watchers")
    options = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    if shutil.which("wrk") is None or shutil.which("prometheus") is None or len(cores) < 2:
        raise SystemExit("this needs the programs `wrk` and `prometheus` (apt install wrk prometheus) and two cores")
    report = BenchReport.from_options("observe", options)
    for measure in (requests, decode_steps):
        with tempfile.TemporaryDirectory() as name:
            for case in measure(Path(name), cores[0], cores[1], options):
                case.add_to(report)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-pages"]:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(open_pages(sys.argv[2]))
    else:
        main()
