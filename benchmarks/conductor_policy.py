"""How long the conductor takes to decide: one request of 24 blocks among many workers, by policy.

    python benchmarks/conductor_policy.py [--json] [--workers 16 1000] [--blocks 24]

Workers have queues and every fourth holds half the prompt, the pool holds most of it and some pulls are under way. A
row is the median over batches of the time for one decision; "route" also enters it into queues, index and records and
takes it out again. The claims are the baselines: 60 us among 16 + 16 workers, 0.5 ms among 1,000 + 1,000.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from itertools import count

from moonpool.base.cluster import PrefillSample, ReportWorker, WorkerInfo, WorkerLoad, WorkerRole
from moonpool.base.keys import object_key
from moonpool.bench.report import BenchReport, bench_parser
from moonpool.conductor.messages import RequestEnded, Route
from moonpool.conductor.placement.policy import POLICY_NAMES, PolicyConfig
from moonpool.conductor.placement.prefix_index import PrefixIndex, fingerprints
from moonpool.conductor.state import ConductorState

CLAIMS_US = {16: 60.0, 1000: 500.0}
BATCHES = 15


def make_state(policy: str, num_workers: int, keys: list[bytes]) -> ConductorState:
    state, rng = ConductorState(PolicyConfig(name=policy), PrefixIndex(), 10_000), random.Random(1)
    half = tuple(keys[: len(keys) // 2])
    for role in WorkerRole:
        for number in range(num_workers):
            state.register(worker_info(f"{role.value}-{number}", role))
    samples = tuple(PrefillSample(tokens, 0, tokens * 1e-4) for tokens in (1000, 5000, 12_000))
    for number in range(0, num_workers, 4):
        name = f"{WorkerRole.PREFILL.value}-{number}"
        load = WorkerLoad(free_pages=4000)
        state.report(ReportWorker(name=name, incarnation=1, sequence=1, load=load, cached=half, prefills=samples))
    state.index.replace_pool([object_key(key) for key in keys[:-2]])
    for number in range(num_workers):
        own = [rng.randbytes(32) for _ in range(len(keys))]
        state.route(_route(f"busy-{number}", own), "bench", 0.0, 0.0)
    for number in range(max(1, num_workers // 20)):
        state.traffic.expect(f"flow-{number}", rng.randrange(2, num_workers + 2), 1 << 28, 0.0, 1e9)
    return state


def worker_info(name: str, role: WorkerRole) -> WorkerInfo:
    return WorkerInfo(
        name=name,
        role=role,
        address=f"unix:/run/{name}.sock",
        incarnation=1,
        identity=b"\1" * 32,
        model="bench",
        block_tokens=512,
        num_pages=6000,
        max_num_seqs=64,
        page_nbytes=160 << 20,
        num_layers=80,
    )


def _route(request_id: str, keys: list[bytes]) -> Route:
    return Route(request_id=request_id, keys=keys, num_tokens=len(keys) * 512 + 100, max_tokens=300)


def deciding(state: ConductorState, keys: list[bytes]) -> Callable[[], object]:
    call = _route("one", keys)
    return lambda: state._choose(call, fingerprints(keys), 1.0)


def routing(state: ConductorState, keys: list[bytes]) -> Callable[[], object]:
    numbers = count()

    def whole() -> None:
        name = f"one-{next(numbers)}"  # a second attempt at a request would not look at pipelines
        state.route(_route(name, keys), "bench", 1.0, 0.0)
        state.request_ended(RequestEnded(request_id=name), 1.0)

    return whole


def microseconds(work: Callable[[], object]) -> float:
    """The median of some batches, each long enough for the clock."""
    work()
    took = []
    for _ in range(BATCHES):
        count, started_s = 0, time.perf_counter()
        while time.perf_counter() - started_s < 0.03:
            work()
            count += 1
        took.append((time.perf_counter() - started_s) / count)
    return statistics.median(took) * 1e6


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 1000])
    parser.add_argument("--blocks", type=int, default=24)
    arguments = parser.parse_args()
    report = BenchReport.from_options("conductor_policy", arguments)
    rng = random.Random(0)
    keys = [rng.randbytes(32) for _ in range(arguments.blocks)]
    for num_workers in arguments.workers:
        for policy in POLICY_NAMES:
            state = make_state(policy, num_workers, keys)
            for what, make in (("decide", deciding), ("route", routing)):
                case = f"{what} {policy} {num_workers}+{num_workers} workers {arguments.blocks} blocks"
                report.add(case, microseconds(make(state, keys)), "us", CLAIMS_US.get(num_workers))


if __name__ == "__main__":
    main()
