"""Generated traffic: the same for the same seed, chained as promised, and like what it stands for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.errors import InvalidInput
from moonpool.traces.columns import Trace
from moonpool.traces.distributions import Arrivals, Quantiles, by_percent, constant, draw_zipf, fit_quantiles
from moonpool.traces.generate import KINDS, generate
from moonpool.traces.reuse import hit_curve, leading_hits
from moonpool.traces.sessions import SessionTurns
from moonpool.traces.statistics import describe
from moonpool.traces.workloads import AgentsSpec, ChatSpec, DocumentsSpec


def check_chained(trace: Trace) -> None:
    """No block has two different blocks in front of it, and ids are numbered by first appearance."""
    before: dict[int, int] = {}
    newest = -1
    for request in trace:
        parent = -1
        for block in request.block_ids.tolist():
            assert before.setdefault(block, parent) == parent
            assert block <= newest + 1
            newest = max(newest, block)
            parent = block


@settings(max_examples=40)
@given(st.sampled_from(list(KINDS)), st.integers(1, 300), st.integers(0, 10**6))
def test_any_kind_is_a_chained_trace_of_the_asked_size(kind: str, num_requests: int, seed: int) -> None:
    trace = generate(kind, num_requests=num_requests, rate_per_s=4.0, seed=seed)
    assert len(trace) == num_requests
    check_chained(trace)


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_trace(kind: str) -> None:
    one, same, other = (generate(kind, num_requests=500, seed=seed) for seed in (7, 7, 8))
    assert one == same
    assert one != other


@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_and_the_arrivals_are_as_asked(kind: str) -> None:
    trace = generate(kind, num_requests=3000, rate_per_s=8.0, arrivals=Arrivals(cv=0.0, step_s=0.5))
    assert len(trace) / trace.duration_s == pytest.approx(8.0, rel=0.01)
    assert np.array_equal(trace.arrival_s % 0.5, np.zeros(3000))


def test_a_conversation_grows_by_its_answers() -> None:
    turns = SessionTurns(go_on=((1.0,),), think_s=constant(10.0), added_tokens=constant(100.0))
    spec = ChatSpec(system_tokens=600, first_message=constant(400), output=constant(200), turns=turns)
    trace = spec.generate(50, 0.5, np.random.default_rng(0))
    assert {int(num) for num in trace.num_input} <= {1000 + 300 * turn for turn in range(50)}
    by_input = dict(zip(trace.num_input.tolist(), leading_hits(trace).tolist(), strict=True))
    assert all(hits == (num_input - 300) // 512 for num_input, hits in by_input.items() if num_input > 1000)


def test_an_edited_turn_keeps_a_part() -> None:
    turns = SessionTurns(
        go_on=((0.9,),), think_s=constant(5.0), added_tokens=constant(0.0), edited=1.0, kept_share=constant(0.5)
    )
    spec = ChatSpec(system_tokens=0, first_message=constant(5120), output=constant(1), turns=turns)
    trace = spec.generate(200, 1.0, np.random.default_rng(0))
    assert set(leading_hits(trace).tolist()) == {0, 5}


def test_questions_share_their_document() -> None:
    spec = DocumentsSpec(
        system_tokens=512, num_documents=3, document_tokens=constant(2048), question_tokens=constant(9)
    )
    trace = spec.generate(300, 1.0, np.random.default_rng(0))
    assert len(np.unique(trace.block_ids)) == 1 + 3 * 4 + 300  # system, documents, and each question's own end
    assert sorted(leading_hits(trace).tolist())[:4] == [0, 1, 1, 5]


def test_agents_share_their_instructions() -> None:
    spec = AgentsSpec(common_tokens=512, num_agents=4, instruction_tokens=constant(1024), task_tokens=constant(100))
    trace = spec.generate(2000, 10.0, np.random.default_rng(0))
    assert (leading_hits(trace) >= 3).mean() > 0.99
    assert describe(trace).dispersion > 2


def test_the_synthetic_mix_is_like_the_papers() -> None:
    """Table 2, and the curve measured on the original (shared/facts/paper.md, C)."""
    for seed in (0, 1, 2):
        trace = generate("synthetic", seed=seed)
        found = describe(trace, (1e6, 2e6, 3e6, 4e6, 5e6, 8e6, 1e7, 3e7, 5e7))
        assert found.num_requests == 3993
        assert found.num_input.mean == pytest.approx(15325, rel=0.05)
        assert found.num_output.mean == pytest.approx(149, rel=0.05)
        assert found.dispersion == pytest.approx(1.0, abs=0.3)
        assert found.no_hit == pytest.approx(0.55, abs=0.03)
        wanted = [0.145, 0.233, 0.315, 0.375, 0.428, 0.536, 0.577, 0.651, 0.651]
        assert list(found.lru_hit_tokens.values()) == pytest.approx(wanted, abs=0.05)


def test_tool_agent_is_like_the_papers() -> None:
    """Table 2 and Fig 9."""
    for seed in (0, 1, 2):
        trace = generate("tool-agent", seed=seed)
        assert len(trace) == 23608
        assert trace.num_input.mean() == pytest.approx(8596, rel=0.05)
        assert trace.num_output.mean() == pytest.approx(182, rel=0.05)
        curve = hit_curve(trace, [1e4, 1e5, 1e6, 2e6, 4e6, 5e6, 8e6, 1e7, 5e7, 1e8])
        wanted = [0.173, 0.363, 0.386, 0.414, 0.484, 0.505, 0.544, 0.561, 0.595, 0.595]
        assert curve == pytest.approx(np.array(wanted), abs=0.04)


def test_zipfs_law() -> None:
    drawn = np.bincount(draw_zipf(10, 1.0, 200_000, np.random.default_rng(0)), minlength=10)
    assert drawn / drawn[0] == pytest.approx(1 / np.arange(1, 11), rel=0.05)
    with pytest.raises(InvalidInput, match="0 things"):
        draw_zipf(0, 1.0, 1, np.random.default_rng(0))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.booleans())
def test_a_fitted_table_stays_within_its_sample(sample: list[float], weighted: bool) -> None:
    values = np.array(sample)
    table = fit_quantiles(values, weights=np.linspace(1, 3, len(values)) if weighted else None)
    drawn = table.draw(100, np.random.default_rng(0))
    assert drawn.min() >= values.min() - 0.001
    assert drawn.max() <= values.max() + 0.001


def test_tables_of_quantiles() -> None:
    table = by_percent({0: 0, 50: 10, 100: 30})
    assert table.mean == 12.5
    assert table.draw(100_000, np.random.default_rng(0)).mean() == pytest.approx(12.5, rel=0.01)
    assert table.spread_tokens(20, np.random.default_rng(0)).mean() == pytest.approx(12.5, rel=0.1)
    assert table.scaled(2.0).mean == 25.0
    for at, values in (((0.0,), (1.0,)), ((0.0, 0.5), (1.0, 2.0)), ((0.0, 1.0), (2.0, 1.0)), ((0.0, 1.0), (1.0,))):
        with pytest.raises(InvalidInput):
            Quantiles(at, values)


def test_what_cannot_be_generated_is_refused() -> None:
    with pytest.raises(InvalidInput, match="there are chat, documents"):
        generate("poetry")
    with pytest.raises(InvalidInput, match="0 requests"):
        generate("chat", num_requests=0)
    with pytest.raises(InvalidInput, match="-1"):
        generate("chat", seed=-1)
    for rate in (0.0, float("nan")):
        with pytest.raises(InvalidInput, match="cannot arrive"):
            generate("documents", rate_per_s=rate)
    with pytest.raises(InvalidInput, match="one column more"):
        SessionTurns(go_on=((0.5, 0.5),), think_s=constant(1), added_tokens=constant(1))
