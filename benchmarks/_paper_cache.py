"""Table 2, Fig 9, Fig 11 and arXiv's table of caches: what the workloads are like, what hits, what is replicated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from _paper_lab import Apart, Lab
from _paper_published import (
    BLOCK_CAPACITIES,
    BLOCK_HIT_RATES,
    HIT_RATE_TOKENS,
    HIT_RATES,
    NEVER_REUSED,
    REPLICA_RANKS,
    REPLICAS,
    SHARE_OF_MOST_AT_3M,
    TABLE_2,
    WORKLOADS,
)
from _paper_rows import Row

from moonpool.traces import Trace, describe, hit_curve, merge

_FINER = "ours are blocks of 512 tokens, the paper's were finer, which finds about 3 points more"
_NO_RESULT = "the generator was made to have it"


def table2(lab: Lab) -> Iterator[Row]:
    for workload, (num_input, num_output, hits, num_requests) in TABLE_2.items():
        trace, origin = lab.trace(workload), lab.origin(workload)
        found = describe(trace)
        note = f"{origin}: {_NO_RESULT}" if origin else "the trace itself"
        yield Row(f"table2 {workload} requests", len(trace), "requests", num_requests, note)
        yield Row(f"table2 {workload} mean input", found.num_input.mean, "tokens", num_input, note)
        yield Row(f"table2 {workload} mean output", found.num_output.mean, "tokens", num_output, note)
        yield Row(f"table2 {workload} cache ratio", found.hit_tokens, "share of tokens", hits, note, _FINER)


def fig9(lab: Lab) -> Iterator[Row]:
    """Hit rate of one LRU cache by its size."""
    for workload, theirs in HIT_RATES.items():
        trace = _all(lab) if workload == "all" else lab.trace(workload)
        origin = "" if workload == "all" else lab.origin(workload)
        note = f"{origin}: {_NO_RESULT}" if origin else _FINER
        if workload == "all":
            note = "the three traces at once, two of them generated; how they were joined is not published"
        why = f"{_FINER}; how popular and how long reused prefixes are is assumed where the trace is generated"
        curve = hit_curve(trace, [*HIT_RATE_TOKENS, 3e6]).tolist()
        for tokens, their, ours in zip(HIT_RATE_TOKENS, theirs, curve, strict=False):
            yield Row(f"fig9 {workload} hit rate at {tokens:,} tokens", ours, "share of tokens", their, note, why)
        at_3m = curve[-1] / max(curve[-2], 1e-9)
        their = SHARE_OF_MOST_AT_3M[workload]
        yield Row(f"fig9 {workload} hit rate at 3M / the most", at_3m, "share", their, note, why)


def _all(lab: Lab) -> Trace:
    return merge([lab.trace(workload) for workload in WORKLOADS])


def fig11(lab: Lab) -> Iterator[Row]:
    """On how many prefill nodes the 10th, 100th, ... most used block is, looked at every 30 s; Algorithm 1, 8 + 8."""
    why = (
        "ours has one pool that every node reads from, and a node keeps what it pulled in its GPUs' pages only while "
        "there is room; the paper's nodes keep each copy in their memory"
    )
    for workload, (most, last) in REPLICAS.items():
        watched = lab.apart(workload, Apart("paper")).watched
        arrived = np.array(watched["time_s"]) <= lab.trace(workload).arrival_s[-1]
        for rank, peak, end in zip(REPLICA_RANKS, most, last, strict=True):
            column = np.array(watched.get(f"replicas_rank_{rank}", [0.0] * len(arrived)))[arrived]
            case, origin = f"fig11 {workload} replicas of block {rank:,}:", lab.origin(workload)
            yield Row(f"{case} most", float(column.max()), "replicas", peak, origin, why)
            if end is not None:
                yield Row(f"{case} at the end", float(column[-1]), "replicas", end, origin, why)


def arxiv_caches(lab: Lab) -> Iterator[Row]:
    trace, origin = lab.trace("tool-agent"), lab.origin("tool-agent")
    found = describe(trace)
    sizes = [1e15 if blocks is None else blocks * trace.block_tokens for blocks in BLOCK_CAPACITIES]
    curve = hit_curve(trace, sizes).tolist()
    why = "made to have Fig 9's curve of token hits, not this one of blocks"
    for blocks, ours, their in zip(BLOCK_CAPACITIES, curve, BLOCK_HIT_RATES["lru"], strict=True):
        size = "without limit" if blocks is None else f"of {blocks:,} blocks"
        yield Row(f"arxiv hit rate, lru {size}", ours, "share of tokens", their, origin, why)
    why = "the store has no such policy; those it has are beside LRU in benchmarks/eviction.py"
    for policy in ("lfu", "by length"):
        for blocks, their in zip(BLOCK_CAPACITIES, BLOCK_HIT_RATES[policy], strict=True):
            size = "without limit" if blocks is None else f"of {blocks:,} blocks"
            yield Row(f"arxiv hit rate, {policy} {size}", None, "share of blocks", their, "", why)
    note = f'theirs: "more than half"; {origin}'
    yield Row("arxiv blocks never used again", found.used_once, "share of blocks", NEVER_REUSED, note, "more than half")
