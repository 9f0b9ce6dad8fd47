"""The paper's workloads and testbeds, simulated; each run is made once, however many figures ask for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from _conversation import CONVERSATION

from moonpool.base.cluster import PullSample
from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.sim.fleet import Machine
from moonpool.sim.physics.hardware import GB, node
from moonpool.sim.physics.model_shape import preset
from moonpool.sim.physics.paper_fit import chunk_cost, mooncake_cost
from moonpool.sim.systems import BASELINE, VLLM_TODAY
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.config import ClusterConfig, PoolKind
from moonpool.sim.world.coupled import CoupledCluster, CoupledConfig
from moonpool.sim.world.recorder import Columns, WorldRecorder
from moonpool.sim.world.results import Results
from moonpool.traces import Trace, read_jsonl, scale_load, slice_count
from moonpool.traces.generate import generate

GENERATED = "trace generated from its published statistics"
NUM_NODES, NUM_PREFILL = 16, 8
MODEL = "llama3-70b"
SEED = 1
FAST25 = Machine(preset(MODEL), node("a800"), mooncake_cost(), "Figs 14 and 7")
OUR_POLICY = "cost"
COUPLED: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm-prefix": {"prefix_caching": True},
    "vllm-chunked": {"chunked_prefill": True},
}
SYSTEMS = ("moonpool", *COUPLED)  # of the paper
TODAY = BASELINE  # what vLLM's users have now; not in the paper
_CHUNKED = ("vllm-chunked", TODAY)
NUM_CHUNKED = 4000
_KINDS = {"conversation": "chat", "tool-agent": "tool-agent", "synthetic": "synthetic"}
_QUICK_REQUESTS = 40
_SAMPLE_S = 30.0  # as Fig 11 looks at replicas

T = TypeVar("T")


class Apart(NamedTuple):
    """Prefill and decode on machines of their own. `gbps`: another network than the paper's; `one_token`: answers are
    no longer than that."""

    policy: str = OUR_POLICY
    pool: PoolKind = "shared"
    num_prefill: int = NUM_PREFILL
    num_decode: int = NUM_NODES - NUM_PREFILL
    gbps: float = 0.0
    one_token: bool = False


class Run(NamedTuple):
    results: Results
    watched: Columns  # gauges over time
    pulls: list[PullSample]

    @property
    def summary(self) -> dict[str, float]:
        return self.results.summary()


OURS = Apart()


class Lab:
    """With `quick` the same on a few requests: to see that it runs, not what comes out."""

    def __init__(self, quick: bool = False) -> None:
        self.quick = quick
        self._known: dict[Any, Any] = {}

    def trace(self, workload: str, load: float = 1.0) -> Trace:
        trace = self._once(("trace", workload), lambda: self._make_trace(workload))
        return trace if load == 1.0 else scale_load(trace, load)

    def origin(self, workload: str) -> str:
        """Empty for the trace itself."""
        return "" if workload == "conversation" and CONVERSATION.exists() else GENERATED

    def apart(self, workload: str, system: Apart = OURS, load: float = 1.0) -> Run:
        return self._once((workload, system, load), lambda: run_apart(self.trace(workload, load), system))

    def coupled(self, workload: str, name: str, load: float = 1.0) -> Results:
        """Chunked prefill of the first requests only: it takes ten times as many steps."""

        def run() -> Results:
            trace = self.trace(workload, load)
            part = slice_count(trace, 0, NUM_CHUNKED) if name == "vllm-chunked" else trace
            return run_coupled(part, name, NUM_NODES)

        return self._once((workload, name, load), run)

    def system(self, workload: str, name: str, load: float = 1.0) -> Results:
        return self.apart(workload, OURS, load).results if name == "moonpool" else self.coupled(workload, name, load)

    def _make_trace(self, workload: str) -> Trace:
        if self.origin(workload):
            trace = generate(_KINDS[workload], num_requests=12_031 if workload == "conversation" else None, seed=SEED)
        else:
            trace = read_jsonl(CONVERSATION)
        return slice_count(trace, 0, _QUICK_REQUESTS) if self.quick else trace

    def _once(self, key: Any, make: Callable[[], T]) -> T:
        if key not in self._known:
            began_s = time.perf_counter()
            self._known[key] = make()
            print(f"  {_told(key)}: {time.perf_counter() - began_s:.1f} s", file=sys.stderr, flush=True)
        found: T = self._known[key]
        return found


def run_apart(trace: Trace, system: Apart, machine: Machine | None = None) -> Run:
    if system.one_token:
        trace = trace.replace(num_output=np.ones(len(trace), dtype=np.int64))
    cluster = SimCluster(_config(system, machine or FAST25), trace)
    watch, pulls = WorldRecorder(cluster, _SAMPLE_S), _follow_pulls(cluster)
    results = Results.of(cluster.run())
    return Run(results, watch.columns(), pulls)


def run_coupled(trace: Trace, name: str, num_nodes: int, machine: Machine | None = None) -> Results:
    machine = machine or FAST25
    config = CoupledConfig(
        shape=machine.shape,
        node=machine.node,
        cost=chunk_cost() if name in _CHUNKED else machine.cost,
        num_nodes=num_nodes,
        **(VLLM_TODAY if name == TODAY else COUPLED[name]),
    )
    return Results.of(CoupledCluster(config, trace).run())


def _config(system: Apart, machine: Machine) -> ClusterConfig:
    spec = machine.node
    if system.gbps:
        spec = replace(spec, num_nics=1, nic_bandwidth=system.gbps * GB / 8)
    return ClusterConfig(
        shape=machine.shape,
        node=spec,
        cost=machine.cost,
        num_prefill=system.num_prefill,
        num_decode=system.num_decode,
        pool=system.pool,
        policy=PolicyConfig(name=system.policy),
    )


def _follow_pulls(cluster: SimCluster) -> list[PullSample]:
    """What workers tell the conductor of their pulls, as it comes."""
    pulls: list[PullSample] = []
    for worker in cluster.prefills.values():
        reporter = worker._reporter
        report = reporter.after_step

        def heard(now_s: float, reporter: Any = reporter, report: Callable[[float], None] = report) -> None:
            told = reporter.pulls
            report(now_s)
            if reporter.pulls is not told:  # it was told
                pulls.extend(told)

        reporter.after_step = heard  # type: ignore[method-assign]
    return pulls


def _told(key: tuple[Any, ...]) -> str:
    parts = [each._asdict() if isinstance(each, Apart) else each for each in key]
    changed = [
        ", ".join(f"{name}={value}" for name, value in part.items() if value != getattr(OURS, name)) or "ours"
        if isinstance(part, dict)
        else str(part)
        for part in parts
    ]
    return " / ".join(changed)
