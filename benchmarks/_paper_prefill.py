"""Figs 5, 8, 10 and 13: how soon first tokens come, and what computing them takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from _paper_lab import OURS, SYSTEMS, Apart, Lab
from _paper_published import (
    ARXIV_TTFT_S,
    BREAK_EVEN_GBPS,
    LOCAL_AND_GLOBAL,
    PREFILL_GPU_S,
    REAL_BY_GBPS,
    RECOMPUTE_TTFT_S,
    THEORETICAL_BY_GBPS,
    TTFT_BY_GBPS,
    TTFT_S,
    WORKLOADS,
)
from _paper_rows import Row

from moonpool.sim.physics.paper_fit import chunk_cost
from moonpool.sim.world.config import PoolKind
from moonpool.traces import Trace

POLICIES = {
    "paper": Apart("paper"),
    "local": Apart("local", "local"),
    "least-loaded": Apart("least-loaded", "local"),
    "random": Apart("random", "local"),
}
_ABSOLUTE = (
    "the load, the number of prefill nodes and the waiting on the decode side of this figure are not published; "
    "the ratios between policies are what is compared"
)
_LENGTHS = "of the lengths in generated traces, and of what is reused together, only means are published"
_QUARTILES = ("first quartile", "median", "third quartile")
_CHUNK_TOKENS = 512
_GBPS = (8, 16, 20, 24, 30, 40, 60, 80, 100, 160, 320, 400)


def fig5(lab: Lab) -> Iterator[Row]:
    yield from _policies(lab, "fig5", "conversation", {name: each[0] for name, each in TTFT_S.items()})
    for policy, (_, *theirs) in TTFT_S.items():
        values = _box(lab.apart("conversation", POLICIES[policy]).results.ttft_s)
        for name, ours, their in zip((*_QUARTILES, "upper whisker"), values, theirs, strict=True):
            yield Row(f"fig5 {policy} TTFT {name}", ours, "s", their, lab.origin("conversation"), _ABSOLUTE)
    ours = lab.apart("conversation").summary["ttft_s_mean"]
    yield Row("fig5 mean TTFT, our own policy", ours, "s", TTFT_S["paper"][0], "not in the paper", _ABSOLUTE)


def arxiv_policies(lab: Lab) -> Iterator[Row]:
    """The same figure in arXiv, with another trace and a heavier load."""
    yield from _policies(lab, "arxiv policies,", "tool-agent", ARXIV_TTFT_S)


def _policies(lab: Lab, figure: str, workload: str, theirs: dict[str, float]) -> Iterator[Row]:
    means: dict[str, float] = {}
    for policy, their in theirs.items():
        means[policy] = lab.apart(workload, POLICIES[policy]).summary["ttft_s_mean"]
        yield Row(f"{figure} mean TTFT {policy}", means[policy], "s", their, lab.origin(workload), _ABSOLUTE)
    for policy in ("local", "least-loaded", "random"):
        ratio, their = means[policy] / means["paper"], theirs[policy] / theirs["paper"]
        why = "ratios grow with the load, which is not published"
        yield Row(f"{figure} {policy} / global", ratio, "ratio of means", their, lab.origin(workload), why)
    is_order = sorted(means, key=lambda policy: means[policy]) == list(theirs)
    yield Row(f"{figure} global < local < least-loaded < random", float(is_order), "1 if so", 1.0, "", "see the means")


def _box(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[float]:
    """Quartiles, and the largest value within 1.5 times their distance above the third."""
    values = values[~np.isnan(values)]
    low, median, high = np.percentile(values, (25, 50, 75)).tolist()
    return [low, median, high, float(values[values <= high + 1.5 * (high - low)].max())]


def fig8(lab: Lab) -> Iterator[Row]:
    for workload in WORKLOADS:
        for name in SYSTEMS:
            if name == "vllm-chunked":
                value, note = _chunked_s(lab.trace(workload)), f"chunks of {_CHUNK_TOKENS} tokens, one pass each"
            else:
                value, note = lab.system(workload, name).summary()["prefill_gpu_s_mean"], ""
            note = "; ".join(part for part in (note, lab.origin(workload)) if part)
            why = "hits of the coupled cache depend on its router (ours: in turn), which is not published"
            why = why if name == "vllm-prefix" else _LENGTHS
            yield Row(f"fig8 {workload} {name}", value, "GPU s", PREFILL_GPU_S[workload][name], note, why)


def _chunked_s(trace: Trace) -> float:
    """Mean time of a prompt cut into chunks, with nothing cached."""
    cost = chunk_cost().prefill
    passes = np.maximum(-(-trace.num_input // _CHUNK_TOKENS), 1)
    return float((cost.prefills_s(trace.num_input, 0) + (passes - 1) * cost.base_s).mean())


def fig10(lab: Lab) -> Iterator[Row]:
    """Ten prefill nodes with caches of their own, or with one pool; answers of one token."""
    small = OURS._replace(num_prefill=10, num_decode=1, one_token=True)
    for workload in WORKLOADS:
        local, pooled = LOCAL_AND_GLOBAL[workload]
        found: dict[str, float] = {}
        cases: tuple[tuple[str, PoolKind, str, tuple[float, float]], ...] = (
            ("local, no affinity", "local", "round-robin", local),
            ("local, good affinity", "local", "local", local),
            ("pool", "shared", "paper", pooled),
        )
        for name, pool, policy, theirs in cases:
            summary = lab.apart(workload, small._replace(pool=pool, policy=policy)).summary
            found[name] = summary["hit_share"]
            why = _LENGTHS if name == "pool" else "the router of the paper's local caches is not published"
            case, origin = f"fig10 {workload} {name}:", lab.origin(workload)
            yield Row(f"{case} hit rate", summary["hit_share"], "share of tokens", theirs[0], origin, why)
            yield Row(f"{case} prefill", summary["prefill_gpu_s_mean"], "GPU s", theirs[1], origin, why)
        is_between = found["local, no affinity"] <= local[0] <= found["local, good affinity"]
        why = "ours are of blocks of 512 tokens, and of a generated trace but for conversation"
        yield Row(f"fig10 {workload}: theirs between the two", float(is_between), "1 if so", 1.0, "", why)


def fig13(lab: Lab) -> Iterator[Row]:
    """The bandwidth at which fetching takes as long as computing; always fetching. KV on its way to decode takes some
    20 Gbit/s of each NIC too, so at 24 what is pulled piles up here, which it did not in the paper. Were nothing handed
    over (answers of one token), pulls would pay from 16 on."""
    origin = lab.origin("synthetic")
    alone = Apart("least-loaded", "none")
    recompute_s = lab.apart("synthetic", alone).summary["ttft_s_mean"]
    yield Row("fig13 TTFT without reuse", recompute_s, "s", RECOMPUTE_TTFT_S, origin, _ABSOLUTE)
    times = []
    for gbps in _GBPS:
        run = lab.apart("synthetic", Apart("paper", gbps=gbps))
        times.append(run.summary["ttft_s_mean"])
        yield Row(f"fig13 TTFT at {gbps} Gbit/s", times[-1], "s", TTFT_BY_GBPS.get(gbps), origin, _ABSOLUTE)
        if gbps in TTFT_BY_GBPS and run.pulls:
            nbytes = float(np.mean([pull.nbytes for pull in run.pulls]))
            why = f"a pull brings {nbytes / 1e9:.1f} GB in the mean here; theirs 4.6 to 5, a whole mean prompt's"
            ideal_s, real_s = nbytes * 8 / gbps / 1e9, float(np.mean([pull.seconds for pull in run.pulls]))
            yield Row(f"fig13 ideal transfer at {gbps} Gbit/s", ideal_s, "s", THEORETICAL_BY_GBPS[gbps], origin, why)
            yield Row(f"fig13 real transfer at {gbps} Gbit/s", real_s, "s", REAL_BY_GBPS[gbps], origin, why)
    yield Row("fig13 break-even", _crossing(_GBPS, times, recompute_s), "Gbit/s", BREAK_EVEN_GBPS, origin, _ABSOLUTE)
    yield _break_even_of_pulls(lab, origin)


def _break_even_of_pulls(lab: Lab, origin: str) -> Row:
    alone = lab.apart("synthetic", Apart("least-loaded", "none", one_token=True)).summary["ttft_s_mean"]
    slow = _GBPS[:4]
    times = [lab.apart("synthetic", Apart("paper", gbps=gbps, one_token=True)).summary["ttft_s_mean"] for gbps in slow]
    note = f"answers of one token, so that nothing is handed over; {origin}"
    return Row("fig13 break-even of pulls alone", _crossing(slow, times, alone), "Gbit/s", None, note)


def _crossing(places: Sequence[float], values: Sequence[float], level: float) -> float:
    """Where falling values pass the level, on a straight line between the two around it."""
    for (left, above), (right, below) in zip(
        zip(places, values, strict=True), zip(places[1:], values[1:], strict=True), strict=False
    ):
        if above > level >= below:
            return left + (right - left) * (above - level) / (above - below)
    return places[0] if values[0] <= level else places[-1]
