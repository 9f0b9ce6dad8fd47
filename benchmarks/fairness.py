"""A tenant that floods a live service: how long another one waits for its first tokens. On two cores.

    python benchmarks/fairness.py --json

One prefill and one decode worker with a random llama, and two tenants. Tenant B asks one prompt after the other,

alone      while no other tenant asks
flooded    while hundreds of clients of tenant A ask, each again as soon as it has its answer, with the highest priority
stormed    while tenant A opens thousands of requests, in waves, and closes those of each wave before their first tokens

The claim: B's median time to first token beside A is at most twice that alone plus 1 s. It is measured without targets
and with one for the time to first token. For the storm also: how many prompts the prefill worker has computed and how
many steps the decode worker, B's included, and how much memory of their own (RssAnon) the processes of the service have
gained when it is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from _live_load import VOCAB, RefusedAnswer, Service, ask, llama

from moonpool.bench.report import BenchReport, bench_parser

SHAPE = llama(512, 1408)
PROMPT_TOKENS, ANSWER_TOKENS = 300, 64
KEYS = {"A": "key-a", "B": "key-b"}
SLO_S = 20.0
_WAVE, _CANCEL_AFTER_S = 800, 5.0  # a front end takes 1,024 connections


class Clients:
    """What the two tenants ask. Prompts differ, so nothing is reused."""

    def __init__(self, url: str, num_asked: int, num_flooding: int, num_cancelled: int, seed: int) -> None:
        self._url, self._rng = url, random.Random(seed)
        self._num_asked, self._num_flooding, self._num_cancelled = num_asked, num_flooding, num_cancelled

    async def _ask(self, tenant: str, num_output: int, priority: int = 0) -> float:
        prompt = [self._rng.randrange(3, VOCAB) for _ in range(PROMPT_TOKENS)]
        return (await ask(self._url, prompt, num_output, key=KEYS[tenant], priority=priority)).ttft_s

    async def alone(self) -> list[float]:
        """Return B's times to first token."""
        return [await self._ask("B", 8) for _ in range(self._num_asked)]

    async def flooded(self) -> list[float]:
        async def flood() -> None:
            while True:
                try:
                    await self._ask("A", ANSWER_TOKENS, -10)
                except RefusedAnswer:
                    await asyncio.sleep(1.0)

        return await self._beside([flood() for _ in range(self._num_flooding)])

    async def stormed(self) -> list[float]:
        async def cancelled() -> None:
            with contextlib.suppress(TimeoutError, RefusedAnswer):
                await asyncio.wait_for(self._ask("A", ANSWER_TOKENS, -10), _CANCEL_AFTER_S)

        async def storm() -> None:
            for _ in range(-(-self._num_cancelled // _WAVE)):
                await asyncio.gather(*(cancelled() for _ in range(_WAVE)))

        return await self._beside([storm()])

    async def _beside(self, load: Sequence[Awaitable[None]]) -> list[float]:
        tasks = [asyncio.ensure_future(each) for each in load]
        await asyncio.sleep(1.0)  # until A's requests are there
        try:
            times = await self.alone()
            if len(tasks) == 1:
                await tasks[0]  # the storm
            return times
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def own_mb(service: Service) -> dict[str, float]:
    """Return the memory of each process that it shares with no other, KV and the pool left out."""

    def read(pid: int) -> float:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1e3  # type: ignore[index]

    return {name: read(pid) for name, pid in service.pids().items()}


def measure(report: BenchReport, options: dict[str, Any], case: str, clients: Callable[[str], Clients]) -> None:
    with tempfile.TemporaryDirectory(prefix="mp-") as name:
        folder = Path(name)
        tenants = folder / "tenants.json"
        tenants.write_text(json.dumps({"tenants": [{"name": one, "api_keys": [key]} for one, key in KEYS.items()]}))
        cores = sorted(os.sched_getaffinity(0))
        pins = {"prefill-0": cores[0], "decode-0": cores[-1]}
        service = Service(folder, SHAPE, pins, prefill=1, decode=1, tenants_file=str(tenants), **options)
        try:
            service.start()
            service.wait_ready()
            asyncio.run(_measure(report, service, clients(service.url), case))
        finally:
            service.close()


async def _measure(report: BenchReport, service: Service, clients: Clients, case: str) -> None:
    await clients.alone()  # makes connections, and the conductor learns
    alone = statistics.median(await clients.alone())
    report.add(f"TTFT p50 of B alone, {case}", 1e3 * alone, "ms")
    for name, beside in (("flooded", clients.flooded), ("stormed", clients.stormed)):
        before, work = own_mb(service), work_done(service)
        times = await beside()
        p50 = statistics.median(times)
        report.add(
            f"TTFT p50 of B {name}, {case}", 1e3 * p50, "ms", 1e3 * alone, at_most=2e3 * alone + 1e3, most=max(times)
        )
        await asyncio.sleep(3.0)
        if name == "stormed":
            gained = {role: each - before[role] for role, each in own_mb(service).items()}
            largest = max(gained, key=lambda role: gained[role])
            report.add(f"memory gained, {case}", sum(gained.values()), "MB", largest=largest, of_it=gained[largest])
            for unit, count in work_done(service).items():
                report.add(f"{unit} while stormed, {case}", count - work[unit], unit, of_b=len(times))


def work_done(service: Service) -> dict[str, float]:
    """Return what the workers have done so far, by their metrics."""
    page = httpx.get(f"{service.url}/metrics", timeout=60).text

    def total(name: str) -> float:
        return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name + "{"))

    return {
        "prompts": total("moonpool_worker_prefill_seconds_count"),
        "steps": total("moonpool_worker_decode_step_seconds_count"),
    }


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--asked", type=int, default=8, help="prompts of tenant B")
    parser.add_argument("--flood", type=int, default=300, help="clients of tenant A")
    parser.add_argument("--storm", type=int, default=10_000, help="requests that tenant A cancels")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts' tokens")
    options = parser.parse_args()
    report = BenchReport.from_options("fairness", options)

    def clients(url: str) -> Clients:
        return Clients(url, options.asked, options.flood, options.storm, options.seed)

    measure(report, {}, "no target", clients)
    measure(report, {"ttft_slo_s": SLO_S}, f"--ttft-slo-s {SLO_S:g}", clients)


if __name__ == "__main__":
    main()
