"""What a thousand busy workers cost the conductor: the processor time of their reports, and of a route among them.

    python benchmarks/conductor_scale.py [--json] [--workers 1000] [--seconds 10]

*reports*: a real conductor in a process of its own; here, half as many prefill as decode connections, each a busy
worker. A decode worker's report has two requests that came and two that are gone, and a sample of every step of 30 ms,
up to the 64 that a worker keeps; a prefill worker's also four cached blocks. The share of a core is the processor time
of the conductor's process per second. Every worker reports as often as the conductor asks. The state before, an
interval of 50 ms for each worker and every sample learnt, is measured in the same run with a twentieth of the workers,
and multiplied.

*route*: a request of 24 blocks among busy workers, without its end: different work waits at each, they hold ten
different parts of the prompt, and half of them pull. Pulls are of one size or of many different ones, and the pool has
as many nodes as there are workers.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import resource
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
from conductor_policy import make_state, worker_info

from moonpool.base.cluster import (
    CONDUCTOR_SERVICE,
    REQUEST_LIMITS,
    DecodeSample,
    PrefillSample,
    RegisterWorker,
    ReportedRequest,
    ReportWorker,
    WorkerLoad,
    WorkerRole,
)
from moonpool.base.rpc import AsyncClient
from moonpool.bench.report import BenchReport, bench_parser
from moonpool.conductor.costs import SampleThinning
from moonpool.conductor.messages import RequestEnded, Route
from moonpool.conductor.service import Conductor, ConductorConfig
from moonpool.conductor.state import ConductorState

BEFORE_S = 0.05
BEFORE_PART = 20  # of the workers report at that interval
STEP_S = 0.03
MAX_SAMPLES = 64
START_S = 0.005  # between the starts of two workers: this process does the work of all of them
BATCHES, BATCH = 40, 25  # of routes
SHARE_CLAIM, ROUTE_CLAIM_US = 0.1, 500.0


def serve(address: str, pipe: Connection, learns_all: bool) -> None:
    """Run a conductor until the pipe closes; each message on it asks for the processor time and the reports so far."""
    if learns_all:
        SampleThinning.take = lambda self, samples, now_s: samples  # type: ignore[method-assign]

    async def run() -> None:
        conductor = Conductor(ConductorConfig(address=address))
        await conductor.start()
        pipe.send(None)
        done = asyncio.Event()

        def answer() -> None:
            try:
                pipe.recv()
            except EOFError:
                asyncio.get_running_loop().remove_reader(pipe.fileno())
                done.set()
                return
            pipe.send(time.process_time())

        asyncio.get_running_loop().add_reader(pipe.fileno(), answer)
        await done.wait()
        await conductor.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the roles of a service
        runner.run(run())


class BusyWorker:
    """Reports after the interval that the conductor asks for, and after `shortest_s` at least."""

    def __init__(self, number: int, shortest_s: float) -> None:
        self._role = WorkerRole.DECODE if number % 3 else WorkerRole.PREFILL
        self._name, self._shortest_s = f"{self._role.value}-{number}", shortest_s
        self._draw = random.Random(number)
        self._number, self._sequence = number, 0
        self.num_reports = 0
        self.interval_s = 0.0

    async def run(self, address: str) -> None:
        await asyncio.sleep(self._number * START_S)
        client = await AsyncClient.connect(
            address, CONDUCTOR_SERVICE, name=self._name, timeout_s=600.0, silence_limits=REQUEST_LIMITS
        )
        try:
            await client.call(RegisterWorker(info=worker_info(self._name, self._role)), timeout_s=600.0)
            await asyncio.sleep(self._draw.random() * self._shortest_s)
            while True:
                answer = await client.call(self._report(max(self.interval_s, self._shortest_s)), timeout_s=600.0)
                self.num_reports += 1
                self.interval_s = answer.interval_s
                await asyncio.sleep(max(self.interval_s, self._shortest_s))
        finally:
            client.close()

    def _report(self, since_s: float) -> ReportWorker:
        self._sequence += 1
        draw, sequence, is_prefill = self._draw, self._sequence, self._role is WorkerRole.PREFILL
        names = [f"{self._number:012x}{sequence:011x}{each}" for each in range(2)]
        gone = [f"{self._number:012x}{sequence - 5:011x}{each}" for each in range(2)]
        steps = min(MAX_SAMPLES, max(1, int(since_s / STEP_S)))
        prompt, answer = (500, 7000, 0), (0, 7500, 300)
        return ReportWorker(
            name=self._name,
            incarnation=1,
            sequence=sequence,
            load=WorkerLoad(num_running=30, running_tokens=9000 + draw.randrange(999), free_pages=900),
            cached=tuple(draw.randbytes(32) for _ in range(4)) if is_prefill else (),
            prefills=(PrefillSample(8000, 7000, draw.uniform(0.1, 0.2)),) if is_prefill else (),
            decodes=() if is_prefill else tuple(DecodeSample(30, 9000, STEP_S) for _ in range(steps)),
            requests=tuple(ReportedRequest(each, *(prompt if is_prefill else answer)) for each in names),
            gone=tuple(gone) if sequence > 5 else (),
        )


async def reporting(address: str, pipe: Connection, num_workers: int, shortest_s: float, seconds: float) -> list[float]:
    """Return [processor seconds of the conductor, reports, interval asked for], each of a second."""
    workers = [BusyWorker(number, shortest_s) for number in range(num_workers)]
    tasks = [asyncio.create_task(each.run(address)) for each in workers]
    while not all(each.num_reports >= 2 for each in workers):
        await asyncio.sleep(0.1)
        for task in tasks:
            if task.done():
                task.result()
    num_before, used_s, began_s = sum(each.num_reports for each in workers), ask(pipe), time.monotonic()
    await asyncio.sleep(seconds)
    used_s, took_s = ask(pipe) - used_s, time.monotonic() - began_s
    num_reports = sum(each.num_reports for each in workers) - num_before
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [used_s / took_s, num_reports / took_s, max(each.interval_s for each in workers)]


def ask(pipe: Connection) -> float:
    pipe.send(None)
    return float(pipe.recv())


def measure_reports(num_workers: int, shortest_s: float, seconds: float, *, learns_all: bool = False) -> list[float]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{Path(folder) / 'c.sock'}"
        pipe, other = context.Pipe()
        process = context.Process(target=serve, args=(address, other, learns_all))
        process.start()
        other.close()
        try:
            pipe.recv()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(reporting(address, pipe, num_workers, shortest_s, seconds))
        finally:
            pipe.close()
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()


def busy_state(num_workers: int, keys: list[bytes], sizes: str) -> ConductorState:
    """A state of conductor_policy.py, with more of everything."""
    state, draw = make_state("cost", num_workers, keys), random.Random(3)
    state.set_pool_nodes({f"n{number}": f"h{number}" for number in range(num_workers)})
    load = WorkerLoad(free_pages=4000)
    for number in range(1, num_workers, 4):
        held = tuple(keys[: 2 + number % 10 * 2])
        name = f"{WorkerRole.PREFILL.value}-{number}"
        state.report(ReportWorker(name=name, incarnation=1, sequence=1, load=load, cached=held))
    for number in range(num_workers):
        waiting = tuple(ReportedRequest(f"{number}-{each}", draw.randint(100, 20_000), 512) for each in range(3))
        name, sequence = f"{WorkerRole.PREFILL.value}-{number}", 1 if number % 4 > 1 else 2
        state.report(ReportWorker(name=name, incarnation=1, sequence=sequence, load=load, requests=waiting))
    for number in range(num_workers // 2):
        nbytes = 1 << 28 if sizes == "equal" else draw.randint(1 << 24, 1 << 32)
        state.traffic.expect(f"pull-{number}", draw.randrange(2, num_workers + 2), nbytes, 0.0, 1e9)
    return state


def route_us(state: ConductorState, keys: list[bytes]) -> float:
    """The median over batches; the requests of a batch are under way together."""
    took_us = []
    for batch in range(BATCHES):
        calls = [
            Route(request_id=f"{batch}-{each}", keys=keys, num_tokens=len(keys) * 512 + 100, max_tokens=300)
            for each in range(BATCH)
        ]
        began_s = time.perf_counter()
        for call in calls:
            state.route(call, "bench", 1.0, 0.0)
        took_us.append((time.perf_counter() - began_s) / BATCH * 1e6)
        for call in calls:
            state.request_ended(RequestEnded(request_id=call.request_id), 1.0)
    return statistics.median(took_us)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    report = BenchReport.from_options("conductor_scale", options)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit[1], 4 * options.workers + 256), limit[1]))
    number = options.workers
    some = max(1, number // BEFORE_PART)
    before, *_ = measure_reports(some, BEFORE_S, options.seconds, learns_all=True)
    share, per_s, interval_s = measure_reports(number, BEFORE_S, options.seconds)
    case = f"reports of {number} busy workers"
    report.add(f"{case}, share of a core", share, "cores", before * number / some, at_most=SHARE_CLAIM)
    report.add(f"{case}, number", per_s, "reports/s", compared=False)
    report.add(f"{case}, interval asked for", interval_s, "s", BEFORE_S, compared=False)
    draw = random.Random(0)
    keys = [draw.randbytes(32) for _ in range(24)]
    for sizes in ("equal", "different"):
        took_us = route_us(busy_state(number, keys, sizes), keys)
        report.add(
            f"route among {number} busy workers, {sizes} pulls", took_us, "us", ROUTE_CLAIM_US, at_most=ROUTE_CLAIM_US
        )


if __name__ == "__main__":
    main()
