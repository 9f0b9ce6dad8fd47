"""What `describe` says of small traces, and of the real one as published in our facts (shared/facts/paper.md, C)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from trace_cases import CONVERSATION, make_trace, needs_conversation, traces

from moonpool.base.errors import InvalidInput
from moonpool.traces.columns import Trace
from moonpool.traces.mooncake_jsonl import read_jsonl
from moonpool.traces.picture import draw
from moonpool.traces.reuse import hit_curve
from moonpool.traces.statistics import TraceStatistics, describe


@pytest.fixture(scope="module")
def conversation() -> Trace:
    return read_jsonl(CONVERSATION)


@needs_conversation
def test_the_real_traces_table(conversation: Trace) -> None:
    found = describe(conversation)
    assert (found.num_requests, found.num_distinct_arrivals) == (12031, 1180)
    assert (found.num_blocks, found.num_unique_blocks) == (288500, 182790)
    assert round(found.duration_s) == 3537
    assert round(found.rate_per_s, 2) == 3.40
    assert round(found.dispersion, 1) == 5.8
    assert round(found.num_input.mean) == 12035
    assert list(found.num_input.percentiles.values()) == pytest.approx(
        [901, 2306, 6909, 15367, 27367, 39550, 85400, 126195], abs=1
    )
    assert round(found.num_output.mean) == 343
    assert list(found.num_output.percentiles.values()) == pytest.approx(
        [10, 156, 350, 472, 597, 698, 1118, 2000], abs=1
    )
    assert round(found.used_once, 2) == 0.76
    hits = (found.hit_tokens, found.hit_blocks, found.hit_mean_per_request)
    assert [round(share * 100, 1) for share in hits] == [37.4, 36.6, 40.9]
    assert [round(share * 100) for share in (found.no_hit, found.one_hit, found.more_hits)] == [0, 61, 39]
    assert [round(gap_s) for gap_s in found.reuse_gap_s.values()] == [45, 135, 531, 1710]
    lru = [round(share * 100, 1) for share in found.lru_hit_tokens.values()]
    assert lru[1:-1] == [4.3, 5.4, 8.6, 13.9, 17.8, 21.1, 26.6, 29.1, 36.6, 37.1]
    assert 2.6 <= lru[0] <= 4.3


@needs_conversation
def test_the_real_traces_curve_by_blocks(conversation: Trace) -> None:
    curve = hit_curve(conversation, [512 * blocks for blocks in (1_000, 10_000, 30_000, 50_000, 100_000)])
    assert [round(share * 100, 1) for share in curve] == [4.5, 21.6, 33.2, 36.2, 37.1]


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
