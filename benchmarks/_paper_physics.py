"""Figs 12 and 14, equation 2 and arXiv's layer-wise storing: what single steps and transfers take."""

from __future__ import annotations

from collections.abc import Iterator

from _paper_lab import MODEL, Lab
from _paper_published import (
    BREAK_EVEN_GB_S,
    LOAD_S,
    PREFILL_SAVED_AT_128K,
    SCHEDULE_S,
    STORE_AFTER_S,
    STORE_LAYER_WISE_S,
    TRANSFER_40_GB_S,
    TRANSFER_100_GB_S,
    TRANSFER_S,
    TTFT_SAVED_AT_128K,
)
from _paper_rows import Row

from moonpool.conductor.crossover import break_even_bandwidth
from moonpool.sim.physics.cost import overlapped_s
from moonpool.sim.physics.hardware import GB, node
from moonpool.sim.physics.model_shape import preset
from moonpool.sim.physics.paper_fit import (
    MEASURED_CACHED_PREFILL_S,
    MEASURED_DECODE_S,
    MEASURED_DECODE_STEPS,
    MEASURED_PREFILL_S,
    cached_tokens,
    paper_cost,
)

_FITTED = "the cost model is fitted to this figure: a residual, no result"


def eq2(lab: Lab) -> Iterator[Row]:
    for gpu, theirs in BREAK_EVEN_GB_S.items():
        ours = break_even_bandwidth(node(gpu).flops, 8192, width=8192, gqa=8)
        yield Row(f"eq2 break-even bandwidth, 8k tokens, {gpu}", ours / GB, "GB/s", theirs, "from peak figures")


def fig12(lab: Lab) -> Iterator[Row]:
    """Published only: an engine's speed is what it does on a network, and a simulated link has none of our engine."""
    measured = "needs that network: not simulated. benchmarks/transfer.py measures our engine beside iperf3"
    for (num_nics, gbps), times in TRANSFER_40_GB_S.items():
        for way in ("transfer engine", "tcp", "gloo"):
            why = "needs that network and torch.distributed: not simulated" if way == "gloo" else measured
            yield Row(f"fig12 40 GB over {num_nics} x {gbps} Gbit/s, {way}", None, "s", times[way], "", why)
    yield Row("fig12 100 GB over 4 x 200 Gbit/s, transfer engine", None, "s", TRANSFER_100_GB_S, "", measured)


def fig14(lab: Lab) -> Iterator[Row]:
    cost, spec, shape = paper_cost(), node("a800"), preset(MODEL)
    for tokens, theirs in MEASURED_PREFILL_S.items():
        yield Row(f"fig14 prefill {tokens // 1024}k", cost.prefill_s(tokens), "s", theirs, _FITTED)
    for tokens, theirs in MEASURED_CACHED_PREFILL_S.items():
        ours = cost.prefill_s(tokens, cached_tokens(tokens))
        yield Row(f"fig14 prefill {tokens // 1024}k, 95 % cached", ours, "s", theirs, _FITTED)
    for tokens, theirs in MEASURED_DECODE_S.items():
        ours = cost.decode_steps_s(1, tokens, MEASURED_DECODE_STEPS)
        yield Row(f"fig14 decode of 128 tokens behind {tokens // 1024}k", ours, "s", theirs, _FITTED)
    for name, rate, times in (("transfer", spec.network_bandwidth, TRANSFER_S), ("load", spec.h2d_bandwidth, LOAD_S)):
        for tokens, theirs in times.items():
            ours = tokens * shape.kv_nbytes_per_token / rate
            yield Row(f"fig14 {name} {tokens // 1024}k", ours, "s", theirs, f"one rate for all five; {_FITTED}")
    why = "takes no simulated time: deciding takes about 0.1 ms here (benchmarks/conductor_policy.py)"
    yield Row("fig14 schedule", None, "s", SCHEDULE_S, "", why)
    yield from _savings()


def _savings() -> Iterator[Row]:
    cost, tokens = paper_cost(), 128 * 1024
    full_s, cached_s = cost.prefill_s(tokens), cost.prefill_s(tokens, cached_tokens(tokens))
    saved = 1 - cached_s / full_s
    yield Row("fig14 prefill saved at 128k, 95 % cached", saved, "share", PREFILL_SAVED_AT_128K, _FITTED)
    rest_s = TRANSFER_S[tokens] + LOAD_S[tokens] + SCHEDULE_S
    saved = 1 - (cached_s + rest_s) / (full_s + rest_s)
    note = f"with the paper's transfer, load and schedule; {_FITTED}"
    yield Row("fig14 TTFT saved at 128k, 95 % cached", saved, "share", TTFT_SAVED_AT_128K, note)


def arxiv_store(lab: Lab) -> Iterator[Row]:
    """What storing KV in host memory adds to a prefill: layer by layer while it computes, and after it."""
    cost, spec, shape = paper_cost(), node("a800"), preset(MODEL)
    why = "their testbed's way to host memory is slower than FAST'25's load of Fig 14 (24 to 49 against 101 GB/s)"
    for tokens, theirs in STORE_AFTER_S.items():
        store_s, compute_s = tokens * shape.kv_nbytes_per_token / spec.h2d_bandwidth, cost.prefill_s(tokens)
        name = f"arxiv storing {tokens // 1024}k"
        yield Row(f"{name}, after the prefill", store_s, "s", theirs, "", why)
        added_s = overlapped_s(compute_s, 0.0, shape.num_layers, store_s) - compute_s
        whole = "ours is the last layer's store alone; theirs is flat at 0.1 s, which no transfer explains"
        yield Row(f"{name}, layer by layer", added_s, "s", STORE_LAYER_WISE_S[tokens], "", whole)
