"""A generator fitted to a trace makes traffic like it."""

from __future__ import annotations

import numpy as np
import pytest
from trace_cases import HOURS, hour, make_trace

from moonpool.base.errors import InvalidInput
from moonpool.traces.changes import change_rate
from moonpool.traces.columns import Trace
from moonpool.traces.distributions import Arrivals
from moonpool.traces.fit import fit, fit_arrivals
from moonpool.traces.generate import generate, generate_like
from moonpool.traces.statistics import describe


def check_alike(trace: Trace, made: Trace) -> None:
    wanted, found = describe(trace), describe(made)
    assert found.num_requests == wanted.num_requests
    assert found.rate_per_s == pytest.approx(wanted.rate_per_s, rel=0.01)
    assert found.num_input.mean == pytest.approx(wanted.num_input.mean, rel=0.05)
    assert found.num_output.mean == pytest.approx(wanted.num_output.mean, rel=0.05)
    assert found.hit_tokens == pytest.approx(wanted.hit_tokens, abs=0.03)
    assert list(found.lru_hit_tokens.values()) == pytest.approx(list(wanted.lru_hit_tokens.values()), abs=0.05)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", HOURS)
def test_like_an_hour(name: str, seed: int) -> None:
    trace = hour(name)
    made = generate_like(trace, seed=seed)
    check_alike(trace, made)
    wanted, found = describe(trace), describe(made)
    assert found.dispersion == pytest.approx(wanted.dispersion, rel=0.2)
    assert found.reuse_gap_s[50] == pytest.approx(wanted.reuse_gap_s[50], rel=0.25)
    assert np.array_equal(made.arrival_s % 3.0, np.zeros(len(made)))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", ["chat", "agents", "tool-agent"])
def test_like_generated_sessions(kind: str, seed: int) -> None:
    trace = generate(kind, num_requests=12_000, seed=seed)
    check_alike(trace, generate_like(trace, seed=seed + 10))


def test_documents_are_stems() -> None:
    trace = generate("documents", num_requests=6000, seed=1)
    wanted, found = describe(trace), describe(generate_like(trace))
    assert len(fit(trace).stems) > 100
    assert found.num_input.mean == pytest.approx(wanted.num_input.mean, rel=0.05)
    assert found.hit_tokens == pytest.approx(wanted.hit_tokens, abs=0.03)


def test_a_fit_can_be_grown() -> None:
    trace = generate("chat", num_requests=3000, seed=3)
    spec = fit(trace)
    longer = spec.generate(9000, 10.0, np.random.default_rng(0))
    assert len(longer) / longer.duration_s == pytest.approx(10.0, rel=0.01)
    assert longer.block_tokens == trace.block_tokens


def test_arrivals_are_found_again() -> None:
    trace = make_trace([(float(at), 4, 1, [at]) for at in range(20_000)])
    for cv, step_s in ((1.0, None), (2.5, 3.0), (0.0, None)):
        arrivals = Arrivals(cv=cv, step_s=step_s)
        found = fit_arrivals(change_rate(trace, 10.0, arrivals, np.random.default_rng(1)))
        assert found.step_s == step_s
        assert found.cv == pytest.approx(cv, rel=0.1, abs=0.2)


def test_a_trace_without_reuse_can_be_fitted() -> None:
    trace = make_trace([(float(at), 4, 1, [at]) for at in range(200)])
    made = generate_like(trace)
    assert describe(made).hit_tokens == 0


def test_too_little_is_refused() -> None:
    with pytest.raises(InvalidInput, match="too small"):
        fit(make_trace([(0.0, 4, 1, [0])] * 99))
    with pytest.raises(InvalidInput, match="in 0 s is too small"):
        fit(make_trace([(0.0, 4, 1, [0])] * 200))
