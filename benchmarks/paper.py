"""One row per published number of Mooncake: ours, theirs, the ratio. Nothing is fitted to what it is compared with.

    python benchmarks/paper.py [--json] [--case fig1 ...]

The conversation trace (12,031 requests, 16 nodes of 8 A800, LLaMA3-70B) is ../shared/traces/conversation_trace.jsonl;
without it a generated one of its character takes its place, and the rows say so. The synthetic trace is always
generated (from its published statistics, its hit curve included, so that curve is no result).

Assumptions, all printed with the rows they matter to:
- Prefill takes what Fig 14 says (a fit to its ten points). Decode of one sequence too; batches are not published: KV of
  all sequences adds up and each further sequence costs what a prompt token costs.
- The load of Figs 1, 5 and 6 is not published. Rows are at the trace's own rate and at the rate at which the coupled
  baseline has its published median TBT; the gain over the baseline is not used to choose it.
- The number of prefill nodes of Figs 1, 5 and 6 is not published: 8 of 16.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _paper_published import (
    BREAK_EVEN_GBPS,
    EFFECTIVE_TTFT_S,
    GLOBAL_GPU_S,
    GLOBAL_HIT_RATE,
    HIT_RATES,
    LOCAL_GPU_S,
    LOCAL_HIT_RATE,
    PREFILL_GPU_S,
    SPLIT_SHARES,
    SPLIT_TARGETS,
    TBT_GAINS,
    TBT_SHARES,
    TBT_TARGETS_S,
    TTFT_S,
    VLLM_TBT_P50_S,
)

from moonpool.conductor.placement.policy import PolicyConfig
from moonpool.sim.physics.hardware import GB, node
from moonpool.sim.physics.model_config import preset
from moonpool.sim.physics.paper_fit import paper_cost
from moonpool.sim.traces import Trace, hit_curve, read_jsonl, scale_load
from moonpool.sim.traces.generate import generate
from moonpool.sim.world.cluster import Cluster
from moonpool.sim.world.config import ClusterConfig, PoolKind
from moonpool.sim.world.coupled import CoupledCluster, CoupledConfig
from moonpool.sim.world.results import Results

TRACE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "conversation_trace.jsonl"
NUM_NODES = 16
NUM_PREFILL = 8
SEED = 1
OUR_POLICY = "ours"
COUPLED = {"vllm": {}, "vllm-prefix": {"prefix_caching": True}, "vllm-chunked": {"chunked_prefill": True}}


class Row(NamedTuple):
    case: str
    value: float
    unit: str
    theirs: float | None
    note: str = ""


@cache
def conversation(load: float = 1.0) -> Trace:
    trace = read_jsonl(TRACE) if TRACE.exists() else generate("chat", num_requests=12_031, rate_per_s=3.4, seed=SEED)
    return trace if load == 1.0 else scale_load(trace, load)


@cache
def synthetic() -> Trace:
    return generate("synthetic", num_requests=3993, rate_per_s=3.91, seed=SEED)


def origin() -> str:
    return "" if TRACE.exists() else "generated trace"


def apart(trace: Trace, pool: PoolKind, policy: str, num_prefill: int, num_decode: int, gbps: float = 0) -> Results:
    """Prefill and decode on machines of their own; with `gbps` another network than the paper's."""
    machine = node("a800")
    if gbps:
        machine = replace(machine, num_nics=1, nic_bandwidth=gbps * GB / 8)
    config = ClusterConfig(
        shape=preset("llama3-70b"),
        node=machine,
        cost=paper_cost(),
        num_prefill=num_prefill,
        num_decode=num_decode,
        pool=pool,
        policy=PolicyConfig(name=policy),
    )
    return Results.of(Cluster(config, trace).run())


@cache
def ours(load: float) -> Results:
    return apart(conversation(load), "shared", OUR_POLICY, NUM_PREFILL, NUM_NODES - NUM_PREFILL)


@cache
def baseline(name: str, load: float) -> Results:
    config = CoupledConfig(
        shape=preset("llama3-70b"), node=node("a800"), cost=paper_cost(), num_nodes=NUM_NODES, **COUPLED[name]
    )
    return Results.of(CoupledCluster(config, conversation(load)).run())


@cache
def matched_load() -> float:
    """The load, in twentieths, at which the coupled baseline's median TBT is nearest to the published one."""
    return min(
        (1.0 + step / 20 for step in range(17)),
        key=lambda load: abs(baseline("vllm", load).summary()["tbt_s_p50"] - VLLM_TBT_P50_S),
    )


def fig1() -> Iterator[Row]:
    """Effective capacity at three targets of TBT."""
    for load in (1.0, matched_load()):
        at = f"load {load:g}"
        systems = {"moonpool": ours(load), **{name: baseline(name, load) for name in COUPLED}}
        for number, target_s in enumerate(TBT_TARGETS_S):
            shares = {name: each.effective_share(EFFECTIVE_TTFT_S, target_s) for name, each in systems.items()}
            for name, share in shares.items():
                theirs = TBT_SHARES[name][number]
                yield Row(f"fig1 {name} within {target_s:g} s, {at}", share, "share", theirs, origin())
            gain = shares["moonpool"] / shares["vllm"] - 1
            yield Row(f"fig1 gain within {target_s:g} s, {at}", gain, "gain over vllm", TBT_GAINS[number], origin())


def fig5() -> Iterator[Row]:
    """Mean TTFT by policy, relative to the whole Algorithm 1."""
    means = {}
    for policy, pool in (("global", "shared"), ("local", "local"), ("least-loaded", "local"), ("random", "local")):
        results = apart(conversation(), pool, policy, NUM_PREFILL, NUM_NODES - NUM_PREFILL)
        means[policy] = results.summary()["ttft_s_mean"]
        yield Row(f"fig5 mean TTFT {policy}", means[policy], "s", TTFT_S[policy], "their load is not published")
        if policy != "global":
            ratio, theirs = means[policy] / means["global"], TTFT_S[policy] / TTFT_S["global"]
            yield Row(f"fig5 {policy} / global", ratio, "ratio of means", theirs, origin())
    yield Row("fig5 mean TTFT ours", ours(1.0).summary()["ttft_s_mean"], "s", TTFT_S["global"], "not in the paper")


def fig8() -> Iterator[Row]:
    """GPU seconds of prefill per request."""
    for name, theirs in PREFILL_GPU_S.items():
        results = ours(1.0) if name == "moonpool" else baseline(name, 1.0)
        yield Row(f"fig8 {name} prefill", results.summary()["prefill_gpu_s_mean"], "GPU s", theirs, origin())


def fig9() -> Iterator[Row]:
    """Hit rate of one LRU cache by its size, conversation trace."""
    rates = hit_curve(conversation(), np.array(list(HIT_RATES)))
    for (tokens, theirs), ours_ in zip(HIT_RATES.items(), rates.tolist(), strict=True):
        note = "blocks of 512 tokens; theirs were finer, which finds about 3 points more"
        yield Row(f"fig9 hit rate at {tokens:,} tokens", ours_, "share of tokens", theirs, note)


def fig10() -> Iterator[Row]:
    """Ten prefill nodes with caches of their own, or with one pool; answers of one token."""
    trace = conversation()
    trace = trace.but(num_output=np.ones(len(trace), dtype=np.int64))
    cases = (
        ("no affinity, local", "local", "round-robin", LOCAL_HIT_RATE, LOCAL_GPU_S),
        ("good affinity, local", "local", "local", LOCAL_HIT_RATE, LOCAL_GPU_S),
        ("pool", "shared", "global", GLOBAL_HIT_RATE, GLOBAL_GPU_S),
    )
    for name, pool, policy, hit_rate, gpu_s in cases:
        summary = apart(trace, pool, policy, 10, 1).summary()
        yield Row(f"fig10 hit rate, {name}", summary["hit_share"], "share of tokens", hit_rate, origin())
        yield Row(f"fig10 prefill, {name}", summary["prefill_gpu_s_mean"], "GPU s", gpu_s, origin())


def fig13() -> Iterator[Row]:
    """The bandwidth at which fetching takes as long as computing, synthetic trace, always fetching."""
    trace = synthetic()
    recompute_s = apart(trace, "none", "least-loaded", NUM_PREFILL, NUM_PREFILL).summary()["ttft_s_mean"]
    above, below = 0.0, 0.0
    for gbps in (10, 15, 20, 24, 30, 40, 60, 80, 100, 200, 400):
        ttft_s = apart(trace, "shared", "global", NUM_PREFILL, NUM_PREFILL, gbps).summary()["ttft_s_mean"]
        yield Row(f"fig13 TTFT at {gbps} Gbit/s", ttft_s, "s", None, "generated trace")
        if ttft_s > recompute_s:
            below = gbps
        elif not above:
            above = gbps
    yield Row("fig13 TTFT without reuse", recompute_s, "s", None, "generated trace")
    yield Row("fig13 break-even", (below + above) / 2, "Gbit/s", BREAK_EVEN_GBPS, f"between {below:g} and {above:g}")


def fig15() -> Iterator[Row]:
    """The best split of 16 nodes, synthetic trace."""
    shares = {}
    for num_prefill, theirs in SPLIT_SHARES.items():
        results = apart(synthetic(), "shared", OUR_POLICY, num_prefill, NUM_NODES - num_prefill)
        shares[num_prefill] = results.effective_share(*SPLIT_TARGETS)
        yield Row(f"fig15 effective share {num_prefill}P", shares[num_prefill], "share", theirs, "generated trace")
    best = max(shares, key=lambda each: shares[each])
    yield Row("fig15 best split", best, "prefill nodes", max(SPLIT_SHARES, key=lambda each: SPLIT_SHARES[each]))


CASES: dict[str, Callable[[], Iterator[Row]]] = {
    each.__name__: each for each in (fig1, fig5, fig8, fig9, fig10, fig13, fig15)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="may be repeated; all without it")
    arguments = parser.parse_args()
    for name in arguments.case or CASES:
        began_s = time.perf_counter()
        for row in CASES[name]():
            tell(row, arguments.json)
        print(f"{name}: {time.perf_counter() - began_s:.0f} s", file=sys.stderr)


def tell(row: Row, as_json: bool) -> None:
    ratio = None if not row.theirs else row.value / row.theirs
    if as_json:
        line = {"bench": "paper", "case": row.case, "value": round(row.value, 4), "unit": row.unit}
        numbers = {"baseline": row.theirs, "ratio": None if ratio is None else round(ratio, 3)}
        print(json.dumps({**line, **numbers, "note": row.note}), flush=True)
    else:
        theirs = "" if row.theirs is None else f"{row.theirs:10.3f}  {ratio:6.2f}x"
        print(f"{row.case:52} {row.value:10.3f} {row.unit:16} {theirs}  {row.note}", flush=True)


if __name__ == "__main__":
    main()
