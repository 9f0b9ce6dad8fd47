"""The simulator against live CPU workers: the same requests, the same rules, and times from a profile measured before.

    python benchmarks/fidelity.py [--json] [--repeat 3] [--seconds 60] [--profile FILE]

Starts the service with one prefill and one decode worker of one thread and one core each, and a random llama. First a
profile is measured (_live_profile.py), then conversations that share a system prompt are played, their turns as a
Poisson process; each round has the same lengths and times, with tokens nobody has seen. The simulated cluster gets
these requests, with the workers' limits, pages and pool. TTFT and TBT are the client's: from sending the request to
the first token, and the mean gap between a request's tokens. The claim: p50 and p90 of both within 10 % of the live
ones (medians of the rounds). What others on the machine disturbed is measured again.

Only then comes what nobody measured: the same requests, twice as fast, on one and on two prefill workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import httpx
import numpy as np
from _live_load import VOCAB, Answer, Quiet, Service, ask, llama
from _live_profile import Calibration

from moonpool.base.keys import chain_keys
from moonpool.bench.report import BenchReport, bench_parser
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.frontend.workers import Connections
from moonpool.launch.plan import ServeConfig
from moonpool.sim.fleet import Profile, write_profile
from moonpool.sim.physics.hardware import GB, GpuSpec, NodeSpec
from moonpool.sim.physics.model_shape import ModelShape, shape_from_config
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.config import ClusterConfig
from moonpool.sim.world.job import DONE, Job
from moonpool.sim.world.stepper import mean_of_longest_s
from moonpool.traces.columns import Trace, offsets_of
from moonpool.worker.config import step_tokens

SHAPE = llama(512, 1408)
LIMIT = 0.10
RATE_PER_S = 1.1
SYSTEM_TOKENS = 256
TURN_TOKENS = (40, 240)
OUTPUT_TOKENS = (8, 48)
MAX_TURNS = 6
NEW_CONVERSATION = 0.3  # chance that an arrival opens one
LONG_GAPS = "long gaps"  # the mean of the longest tenth of a request's gaps; not claimed: clients see tokens bunched
REPORT_EVERY_S = 0.05  # as the workers' own
MAX_OTHERS = 0.06  # cores that others may use while something is measured
MAX_ATTEMPTS = 4
T = TypeVar("T")


class TimedPrompt(Protocol):
    """What a trace is made of."""

    @property
    def arrival_s(self) -> float: ...

    @property
    def prompt(self) -> list[int]: ...

    @property
    def num_output(self) -> int: ...


class Request(NamedTuple):
    arrival_s: float
    prompt: list[int]
    num_output: int


class Load(NamedTuple):
    """Conversations: a Poisson process of turns, each of any of them. Lengths and times are of `seed` alone."""

    lasts_s: float
    rate_per_s: float
    seed: int

    def requests(self, token_seed: int) -> list[Request]:
        """An answer's tokens are stand-ins in the next prompt: how many there are matters, not what was said."""
        shapes, words = random.Random(self.seed), random.Random(token_seed)

        def tokens(count: int) -> list[int]:
            return [words.randrange(3, VOCAB) for _ in range(count)]

        system = tokens(SYSTEM_TOKENS)
        talks: list[tuple[int, list[int]]] = []  # turns so far, and all that was said
        requests, now_s = [], shapes.expovariate(self.rate_per_s)
        while now_s < self.lasts_s:
            opens = not talks or shapes.random() < NEW_CONVERSATION
            turns, said = (0, system) if opens else talks.pop(shapes.randrange(len(talks)))
            prompt = said + tokens(shapes.randint(*TURN_TOKENS))
            num_output = shapes.randint(*OUTPUT_TOKENS)
            requests.append(Request(now_s, prompt, num_output))
            if turns + 1 < MAX_TURNS:
                talks.append((turns + 1, prompt + tokens(num_output)))
            now_s += shapes.expovariate(self.rate_per_s)
        return requests


def to_trace(requests: Sequence[TimedPrompt], block_tokens: int) -> Trace:
    """Exactly these requests; a block is known by its chain key, as the service knows it."""
    numbers: dict[bytes, int] = {}
    ids: list[int] = []
    counts = []
    for at, request in enumerate(requests):
        keys = chain_keys(bytes(32), request.prompt, block_tokens)
        if len(request.prompt) % block_tokens:
            keys.append(at.to_bytes(8, "big"))  # the last block, in part: nobody shares it
        ids += [numbers.setdefault(key, len(numbers)) for key in keys]
        counts.append(len(keys))
    return Trace(
        name="fidelity",
        block_tokens=block_tokens,
        arrival_s=np.array([each.arrival_s for each in requests]),
        num_input=np.array([len(each.prompt) for each in requests]),
        num_output=np.array([each.num_output for each in requests]),
        block_ids=np.array(ids),
        block_offsets=offsets_of(np.array(counts)),
    )


# live


class Round(NamedTuple):
    answers: list[Answer]
    reused_tokens: int  # of the prompts, by the decision records


class Measured(NamedTuple):
    profile: Profile
    rounds: list[Round]
    others: list[float]  # cores that others used: while the profile was measured, and in each round


class Live:
    """Measures a service, one thing at a time; what others on the machine disturbed is measured again."""

    def __init__(self, service: Service, lock: Path | None) -> None:
        self._service, self._lock = service, lock

    async def measure(self, load: Load, repeat: int) -> Measured:
        profile, others = await self._in_quiet("profile", self._profile)
        rounds, all_others = [], [others]
        for number in range(1, repeat + 1):

            async def play_round(attempt: int, number: int = number) -> Round:
                return await self._round(load.requests(token_seed=1000 * number + attempt))

            found, others = await self._in_quiet(f"round {number}/{repeat}", play_round)
            rounds.append(found)
            all_others.append(others)
        return Measured(profile, rounds, all_others)

    async def _in_quiet(self, what: str, act: Callable[[int], Awaitable[T]]) -> tuple[T, float]:
        """What came of it, and how many cores others used; the quietest of a few attempts, the first quiet one."""
        found: list[tuple[float, T]] = []
        for attempt in range(MAX_ATTEMPTS):
            with _held(self._lock):
                quiet = Quiet(self._service)
                outcome = await act(attempt)
                found.append((quiet.others(), outcome))
            print(f"{what}: others used {found[-1][0]:.2f} cores meanwhile", file=sys.stderr, flush=True)
            if found[-1][0] <= MAX_OTHERS:
                break
        others, outcome = min(found, key=lambda each: each[0])
        return outcome, others

    async def _profile(self, attempt: int) -> Profile:
        connections = Connections(self._service.conductor_address)
        try:
            block_tokens = self._service.config.block_tokens
            return await Calibration(self._service.url, connections, block_tokens, seed=attempt).measure()
        finally:
            await connections.close()

    async def _round(self, requests: Sequence[Request]) -> Round:
        answers = await play(self._service.url, requests)
        async with httpx.AsyncClient() as client:
            page = await client.get(f"{self._service.url}/v1/records", params={"limit": len(requests)})
        records = page.raise_for_status().json()["data"]
        return Round(answers, sum(record["cached_tokens"] for record in records))


async def play(url: str, requests: Sequence[Request]) -> list[Answer]:
    begin_s = time.perf_counter() + 0.1

    async def send(request: Request) -> Answer:
        await asyncio.sleep(begin_s + request.arrival_s - time.perf_counter())
        return await ask(url, request.prompt, request.num_output)

    return list(await asyncio.gather(*map(send, requests)))


@contextlib.contextmanager
def _held(lock: Path | None) -> Iterator[None]:
    """Whoever else measures on this machine waits meanwhile."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# simulated


def cluster_config(
    config: ServeConfig, profile: Profile, sizes: Mapping[str, int] = SHAPE, **changes: Any
) -> ClusterConfig:
    shape = shape_from_config({**sizes, "model_type": "llama", "torch_dtype": "float32"}, "random llama")
    return replace(
        ClusterConfig(
            shape=shape,
            node=_node(shape, config.host_kv_nbytes, config.pool_nbytes),
            cost=profile.cost(),
            num_prefill=config.prefill,
            num_decode=config.decode,
            max_run_blocks=1,
            policy=PolicyConfig(name=config.policy),
            answers_between_steps=True,
            max_batch_tokens=step_tokens(config.max_batch_tokens, config.device),
            max_num_seqs=config.max_num_seqs,
            report_every_s=REPORT_EVERY_S,
            asked_tokens=1,
        ),
        **changes,
    )


def _node(shape: ModelShape, kv_nbytes: int, pool_nbytes: int) -> NodeSpec:
    """A core with the workers' KV memory. Bytes move within one machine's memory: what that takes is in the profile's
    overheads, so that links are as good as free here."""
    hbm = (kv_nbytes + shape.weights_nbytes) / 0.9 + 1
    free = 1000 * GB
    gpu = GpuSpec(
        name="cpu", bf16_flops=1.0, hbm_nbytes=hbm, hbm_bandwidth=1.0, peer_bandwidth=1.0, peer_share=1.0,
        h2d_bandwidth=free,
    )  # fmt: skip
    return NodeSpec(
        gpu=gpu, num_gpus=1, num_nics=1, nic_bandwidth=free, nic_share=1.0, h2d_share=1.0, dram_nbytes=pool_nbytes
    )


def simulate(config: ClusterConfig, trace: Trace) -> list[Job]:
    return SimCluster(config, trace).run()


# what came out


def percentiles(columns: dict[str, list[float]]) -> dict[str, float]:
    return {
        f"{name} p{percent}": float(np.percentile(values, percent))
        for name, values in columns.items()
        for percent in (50, 90)
    }


def of_live(answers: Sequence[Answer]) -> dict[str, float]:
    return percentiles(
        {
            "TTFT": [each.ttft_s for each in answers],
            "TBT": [each.mean_gap_s for each in answers],
            LONG_GAPS: [mean_of_longest_s([(gap_s, 1) for gap_s in each.gaps_s]) for each in answers],
        }
    )


def of_jobs(jobs: Sequence[Job]) -> dict[str, float]:
    assert all(job.outcome == DONE for job in jobs), "live, every request was answered"
    return percentiles(
        {
            "TTFT": [job.ttft_s or 0.0 for job in jobs],
            "TBT": [job.mean_gap_s or 0.0 for job in jobs],
            LONG_GAPS: [job.tbt_s or 0.0 for job in jobs],
        }
    )


class Reporter:
    """Reports simulated figures beside live ones. A figure of an earlier commit is no better or worse than another."""

    def __init__(self, report: BenchReport) -> None:
        self._report = report

    def say(self, text: str = "") -> None:
        if not self._report.as_json:
            print(text, flush=True)

    def compare_all(self, simulated: dict[str, float], lives: Sequence[dict[str, float]]) -> None:
        self.say(f"{'metric':<25} {'live':>9} {'(rounds)':>18} {'simulated':>10} {'error':>8}  within {LIMIT:.0%}?")
        for name, value in simulated.items():
            self.compared(name, value, [live[name] for live in lives])

    def compared(self, name: str, simulated: float, live: list[float]) -> None:
        middle = statistics.median(live)
        error = simulated / middle - 1
        spread = f"{min(live) * 1e3:.1f} .. {max(live) * 1e3:.1f}"
        claim: dict[str, Any] = {} if name.startswith(LONG_GAPS) else {"limit": LIMIT, "ok": abs(error) <= LIMIT}
        verdict = ("yes" if claim["ok"] else "NO") if claim else "(not claimed)"
        text = f"{name:<25} {middle * 1e3:9.1f} {spread:>18} {simulated * 1e3:10.1f} {error:+8.1%}  {verdict}"
        self._add(name, simulated, "s", middle, text, live_min=min(live), live_max=max(live), **claim)

    def counted(self, what: str, simulated: int, live: list[int], unit: str) -> None:
        """Numbers without a claim."""
        text = f"{what}: live {', '.join(map(str, live))}; simulated {simulated}"
        self._add(what, simulated, unit, statistics.median(live), text)

    def what_if(self, case: str, found: dict[str, float], now: dict[str, float]) -> None:
        for name, value in found.items():
            text = f"{case:<34} {name:<14} {value * 1e3:9.1f} ms  ({value / now[name]:.2f} of today's)"
            self._add(f"what if: {case}: {name}", value, "s", now[name], text)

    def _add(self, case: str, value: float, unit: str, baseline: float, text: str, **more: Any) -> None:
        self._report.add(case, value, unit, baseline, compared=False, text=text, **more)


def report(measured: Measured, config: ClusterConfig, trace: Trace, reporter: Reporter) -> None:
    jobs = simulate(config, trace)
    simulated, lives = of_jobs(jobs), [of_live(each.answers) for each in measured.rounds]
    reporter.say(f"{len(trace)} requests in {trace.duration_s:.0f} s, {len(lives)} rounds; times in ms")
    reporter.compare_all(simulated, lives)
    reused = [each.reused_tokens for each in measured.rounds]
    reporter.counted("reused tokens of prompts", sum(job.reused_tokens for job in jobs), reused, "tokens")
    if max(measured.others) > MAX_OTHERS:
        reporter.say(f"the machine was not quiet: others used up to {max(measured.others):.2f} cores meanwhile")
    reporter.say()
    faster = trace.replace(arrival_s=trace.arrival_s / 2)
    reporter.what_if("twice the rate", of_jobs(simulate(config, faster)), simulated)
    doubled = replace(config, num_prefill=2 * config.num_prefill)
    reporter.what_if("twice the rate, 2 prefill workers", of_jobs(simulate(doubled, faster)), simulated)


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each round")
    parser.add_argument("--rate", type=float, default=RATE_PER_S, help="of requests, per second")
    parser.add_argument("--seed", type=int, default=1, help="of the requests' lengths and times")
    parser.add_argument("--profile", type=Path, help="where to save the measured profile, for moonpool replay")
    parser.add_argument("--lock", type=Path, help="a file to hold locked while something is measured")
    options = parser.parse_args()
    reporter = Reporter(BenchReport.from_options("fidelity", options))
    load = Load(options.seconds, options.rate, options.seed)
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        service = Service(Path(folder), SHAPE, pins={"prefill-0": 0, "decode-0": 1}, prefill=1, decode=1)
        try:
            service.start()
            service.wait_ready()
            measured = asyncio.run(Live(service, options.lock).measure(load, options.repeat))
        finally:
            service.close()
    if options.profile is not None:
        write_profile(options.profile, measured.profile)
    trace = to_trace(load.requests(token_seed=0), service.config.block_tokens)
    report(measured, cluster_config(service.config, measured.profile), trace, reporter)


if __name__ == "__main__":
    main()
