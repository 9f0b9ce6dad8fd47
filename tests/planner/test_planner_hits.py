"""What pools find: against caches that are really run, and what must hold for every trace."""

from __future__ import annotations

from collections import OrderedDict
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_cases import BLOCK_TOKENS, HOURS, hour, make_trace, run_lru, run_share, traces

from moonpool.base.errors import InvalidInput
from moonpool.planner.demand import PoolSize, ReuseProfile, TierHits, demand_of, prefill_times, saved_gpu_s, tier_hits
from moonpool.sim.fleet import machine_for
from moonpool.sim.physics.cost import PrefillCost
from moonpool.sim.physics.hardware import node
from moonpool.sim.physics.model_shape import preset
from moonpool.traces.columns import Trace
from moonpool.traces.reuse import hit_curve

COST = PrefillCost(base_s=0.1, per_token_s=0.01, per_square_s=0.001, per_prefix_s=0.002)
BLOCKS = st.integers(0, 20)


def run_two_tiers(trace: Trace, dram_blocks: int, ssd_blocks: int) -> list[tuple[int, int]]:
    """Tokens found in DRAM, and in both less that, per request. A block moves up when it is used, and down when it is
    pushed out."""
    dram: OrderedDict[int, None] = OrderedDict()
    ssd: OrderedDict[int, None] = OrderedDict()
    found = []
    for request in trace:
        ids = request.block_ids.tolist()
        in_dram = next((at for at, each in enumerate(ids) if each not in dram), len(ids))
        in_both = next((at for at, each in enumerate(ids) if each not in dram and each not in ssd), len(ids))
        tokens = [min(count * BLOCK_TOKENS, request.num_input - 1) for count in (in_dram, in_both)]
        found.append((tokens[0], tokens[1] - tokens[0]))
        for each in reversed(ids):
            dram.pop(each, None)
            ssd.pop(each, None)
            dram[each] = None
            if len(dram) > dram_blocks:
                ssd[dram.popitem(last=False)[0]] = None
            if len(ssd) > ssd_blocks:
                ssd.popitem(last=False)
    return found


@given(traces(), BLOCKS, BLOCKS)
def test_tiers_find_what_two_caches_find_that_are_really_run(trace: Trace, dram: int, ssd: int) -> None:
    found = tier_hits(ReuseProfile.of(trace), PoolSize(dram * BLOCK_TOKENS, ssd * BLOCK_TOKENS), 1)
    assert list(zip(found.dram.tolist(), found.ssd.tolist(), strict=True)) == run_two_tiers(trace, dram, ssd)


@given(traces())
def test_the_curve_is_that_of_the_trace_and_never_falls(trace: Trace) -> None:
    profile = ReuseProfile.of(trace)
    capacities = [0.0, 3.0, 4.0, 9.0, 40.0, 1e9, float("inf")]
    shares = [profile.share(capacity) for capacity in capacities]
    assert shares[:-1] == pytest.approx(hit_curve(trace, capacities[:-1]).tolist())
    assert shares == sorted(shares)
    assert shares[-1] == shares[-2]


@given(traces(), BLOCKS)
def test_saved_time_is_counted_request_by_request(trace: Trace, blocks: int) -> None:
    saved = saved_gpu_s(ReuseProfile.of(trace), COST, blocks * BLOCK_TOKENS)
    for request, (hit, _), seconds in zip(trace, run_two_tiers(trace, blocks, 0), saved.tolist(), strict=True):
        expected = COST.prefill_s(request.num_input) - COST.prefill_s(request.num_input, hit)
        assert seconds == pytest.approx(max(0.0, expected))


@given(traces(), BLOCKS, BLOCKS)
def test_a_larger_pool_never_makes_a_prefill_longer(trace: Trace, dram: int, ssd: int) -> None:
    machine = machine_for(preset("llama3-70b"), node("a800"))
    profile, block_nbytes = ReuseProfile.of(trace), BLOCK_TOKENS * machine.shape.kv_nbytes_per_token
    small = demand_of(profile, PoolSize(dram * block_nbytes), machine)
    more_ssd = demand_of(profile, PoolSize(dram * block_nbytes, ssd * block_nbytes), machine)
    more_dram = demand_of(profile, PoolSize((dram + ssd) * block_nbytes), machine)
    assert np.all(more_ssd.prefill_s <= small.prefill_s + 1e-12)
    assert np.all(more_dram.prefill_s <= more_ssd.prefill_s + 1e-12)


def test_a_disk_slower_than_computing_is_not_asked() -> None:
    machine = machine_for(preset("llama3-70b"), node("a800"))
    slow = machine._replace(node=machine.node.__class__(gpu=machine.node.gpu, num_ssds=1, ssd_read_bandwidth=1e9))
    found = TierHits(np.array([1024]), np.array([4096]))
    for which, ssd in ((machine, 4096), (slow, 0)):
        seconds, used = prefill_times(which, np.array([8192]), found)
        assert (used.dram.tolist(), used.ssd.tolist()) == ([1024], [ssd])
        assert seconds[0] <= machine.cost.prefill_s(8192, 1024)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no requests"):
        ReuseProfile.of(make_trace([]))
    with pytest.raises(InvalidInput, match="bytes"):
        tier_hits(ReuseProfile.of(make_trace([(0.0, 4, 1, [0])])), PoolSize(-1.0), 1)


KNOWN_HITS = {1e6: 5.4, 2e6: 8.6, 3e6: 13.9, 5e6: 21.1, 1e7: 29.1, 3e7: 36.6, 5e7: 37.1, float("inf"): 37.4}


def plain_times(trace: Trace, cost: PrefillCost) -> tuple[float, float]:
    """Mean prefill times without a cache, and with one of 30 million tokens that is really run."""
    leading = run_lru(trace, 3e7 // trace.block_tokens)
    lengths = trace.num_input.tolist()
    hits = [min(blocks * trace.block_tokens, length - 1) for blocks, length in zip(leading, lengths, strict=True)]
    alone_s = [cost.prefill_s(length) for length in lengths]
    cached_s = [cost.prefill_s(length, hit) for length, hit in zip(lengths, hits, strict=True)]
    return fmean(alone_s), fmean(map(min, alone_s, cached_s))


@pytest.mark.parametrize("name", HOURS)
def test_an_hour_hits_what_is_known(name: str) -> None:
    trace = hour(name)
    profile = ReuseProfile.of(trace)
    cost = machine_for(preset("llama3-70b"), node("a800")).cost.prefill
    known, known_s = KNOWN_HITS, (1.681, 1.117)  # of the conversation trace
    if name != "conversation":
        known = {tokens: 100 * run_share(trace, tokens) for tokens in (1e6, 3e6, 1e7, float("inf"))}
        known_s = plain_times(trace, cost)
    for tokens, percent in known.items():
        assert 100 * profile.share(tokens) == pytest.approx(percent, abs=0.1)
    alone_s = cost.prefills_s(profile.trace.num_input, np.zeros(len(profile.trace))).mean()
    assert alone_s == pytest.approx(known_s[0], rel=0.01)
    assert alone_s - saved_gpu_s(profile, cost, 3e7).mean() == pytest.approx(known_s[1], rel=0.01)
