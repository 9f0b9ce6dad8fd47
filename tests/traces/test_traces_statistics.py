"""What `describe` says of small traces, and of the real one as published in our facts (shared/facts/paper.md, C)."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from trace_cases import HOURS, hour, make_trace, run_lru, run_share, traces

from moonpool.base.errors import InvalidInput
from moonpool.traces.columns import Trace
from moonpool.traces.picture import draw
from moonpool.traces.reuse import hit_curve
from moonpool.traces.statistics import CURVE_TOKENS, GAP_PERCENTILES, LENGTH_PERCENTILES, TraceStatistics, describe


class Table(NamedTuple):
    """What is known of an hour, rounded as in our facts."""

    counts: tuple[int, int, int, int, int]  # requests, distinct arrivals, blocks, unique blocks, seconds
    rate_per_s: float
    dispersion: float
    num_input: list[float]  # mean and percentiles
    num_output: list[float]
    used_once: float
    hits: list[float]  # tokens, blocks, mean per request, in percent
    by_hits: list[int]  # requests with none, one, more, in percent
    reuse_gap_s: list[int]
    lru: dict[float, float]  # percent of tokens by capacity
    smallest_lru: tuple[float, float]  # what the smallest cache is between


CONVERSATION_TABLE = Table(
    counts=(12031, 1180, 288500, 182790, 3537),
    rate_per_s=3.40,
    dispersion=5.8,
    num_input=[12035, 901, 2306, 6909, 15367, 27367, 39550, 85400, 126195],
    num_output=[343, 10, 156, 350, 472, 597, 698, 1118, 2000],
    used_once=0.76,
    hits=[37.4, 36.6, 40.9],
    by_hits=[0, 61, 39],
    reuse_gap_s=[45, 135, 531, 1710],
    lru=dict(zip(CURVE_TOKENS[1:-1], [4.3, 5.4, 8.6, 13.9, 17.8, 21.1, 26.6, 29.1, 36.6, 37.1], strict=True)),
    smallest_lru=(2.6, 4.3),
)


def plain_table(trace: Trace) -> Table:
    """The same by plain counting, request by request."""
    ids = [request.block_ids.tolist() for request in trace]
    uses, last_s, gaps_s = Counter(block for each in ids for block in each), dict[int, float](), list[float]()
    for at_s, blocks in zip(trace.arrival_s.tolist(), ids, strict=True):
        gaps_s += [at_s - last_s[block] for block in blocks if block in last_s and block != ids[0][0]]
        last_s |= dict.fromkeys(blocks, at_s)
    leading = np.array(run_lru(trace, math.inf))
    saved = np.minimum(leading * trace.block_tokens, trace.num_input - 1)
    per_burst = np.bincount((trace.arrival_s // 3.0).astype(int))
    shares = (saved.sum() / trace.num_input.sum(), leading.sum() / uses.total(), (saved / trace.num_input).mean())
    by_hits = ((leading == 0).mean(), (leading == 1).mean(), (leading > 1).mean())
    capacities = (1e5, 1e6, 3e6, 1e7, 1e8)
    smallest = 100 * run_share(trace, CURVE_TOKENS[0])
    return Table(
        counts=(len(ids), len(set(trace.arrival_s.tolist())), uses.total(), len(uses), round(trace.arrival_s[-1])),
        rate_per_s=round(len(ids) / float(trace.arrival_s[-1]), 2),
        dispersion=round(float(per_burst.var() / per_burst.mean()), 1),
        num_input=[round(trace.num_input.mean()), *np.percentile(trace.num_input, LENGTH_PERCENTILES)],
        num_output=[round(trace.num_output.mean()), *np.percentile(trace.num_output, LENGTH_PERCENTILES)],
        used_once=round(list(uses.values()).count(1) / len(uses), 2),
        hits=[round(100 * float(share), 1) for share in shares],
        by_hits=[round(100 * float(share)) for share in by_hits],
        reuse_gap_s=[round(gap_s) for gap_s in np.percentile(gaps_s, GAP_PERCENTILES).tolist()],
        lru={tokens: round(100 * run_share(trace, tokens), 1) for tokens in capacities},
        smallest_lru=(smallest - 0.01, smallest + 0.01),
    )


@pytest.mark.parametrize("name", HOURS)
def test_the_table_of_an_hour(name: str) -> None:
    trace = hour(name)
    found, known = describe(trace), CONVERSATION_TABLE if name == "conversation" else plain_table(trace)
    assert (found.num_requests, found.num_distinct_arrivals) == known.counts[:2]
    assert (found.num_blocks, found.num_unique_blocks) == known.counts[2:4]
    assert round(found.duration_s) == known.counts[4]
    assert round(found.rate_per_s, 2) == known.rate_per_s
    assert round(found.dispersion, 1) == known.dispersion
    for lengths, wanted in ((found.num_input, known.num_input), (found.num_output, known.num_output)):
        assert round(lengths.mean) == wanted[0]
        assert list(lengths.percentiles.values()) == pytest.approx(wanted[1:], abs=1)
    assert round(found.used_once, 2) == known.used_once
    hits = (found.hit_tokens, found.hit_blocks, found.hit_mean_per_request)
    assert [round(share * 100, 1) for share in hits] == known.hits
    assert [round(share * 100) for share in (found.no_hit, found.one_hit, found.more_hits)] == known.by_hits
    assert [round(gap_s) for gap_s in found.reuse_gap_s.values()] == known.reuse_gap_s
    lru = {tokens: round(share * 100, 1) for tokens, share in found.lru_hit_tokens.items()}
    assert {tokens: lru[int(tokens)] for tokens in known.lru} == known.lru
    low, high = known.smallest_lru
    assert low <= 100 * found.lru_hit_tokens[int(CURVE_TOKENS[0])] <= high


@pytest.mark.parametrize("name", HOURS)
def test_the_curve_of_an_hour_by_blocks(name: str) -> None:
    trace, blocks = hour(name), (1_000, 10_000, 30_000, 50_000, 100_000)
    known = [4.5, 21.6, 33.2, 36.2, 37.1]  # of the conversation trace
    if name != "conversation":
        known = [round(run_share(trace, 512 * each) * 100, 1) for each in blocks]
    assert [round(share * 100, 1) for share in hit_curve(trace, [512 * each for each in blocks])] == known


def test_a_small_trace() -> None:
    rows = [(0.0, 8, 2, [0, 1]), (1.0, 8, 4, [0, 1]), (11.0, 6, 6, [0, 2]), (11.0, 3, 8, [3])]
    found = describe(make_trace(rows), (4, 1000))
    assert (found.num_requests, found.duration_s, found.num_distinct_arrivals) == (4, 11.0, 3)
    assert (found.num_blocks, found.num_unique_blocks, found.used_once) == (7, 4, 0.5)
    assert found.hit_tokens == (7 + 4) / 25  # the last token of a prompt is always computed
    assert found.hit_blocks == 3 / 7
    assert (found.no_hit, found.one_hit, found.more_hits) == (0.5, 0.25, 0.25)
    assert found.reuse_gap_s[50] == 1.0  # of block 1; block 0 is left out
    assert found.lru_hit_tokens == {4: 8 / 25, 1000: 11 / 25}


@given(traces())
def test_every_trace_can_be_described_and_drawn(trace: Trace) -> None:
    found = describe(trace)
    assert msgspec.json.decode(msgspec.json.encode(found), type=TraceStatistics) == found
    shares = list(found.lru_hit_tokens.values())
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(found.hit_tokens)
    assert all(len(line) <= 60 for line in draw(trace, found, width=60))


def test_nothing_cannot_be_described() -> None:
    with pytest.raises(InvalidInput, match="has no requests"):
        describe(make_trace([]))
