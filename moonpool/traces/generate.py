"""Generated traces by kind; the same seed gives the same trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.traces.changes import change_rate
from moonpool.traces.columns import Trace
from moonpool.traces.distributions import Arrivals
from moonpool.traces.fit import fit
from moonpool.traces.published import (
    SYNTHETIC_RATE_PER_S,
    SYNTHETIC_REQUESTS,
    TOOL_AGENT_RATE_PER_S,
    TOOL_AGENT_REQUESTS,
    synthetic_mix,
    tool_agent,
)
from moonpool.traces.workloads import AgentsSpec, ChatSpec, DocumentsSpec

MAX_REQUESTS = 100_000_000
Generate: TypeAlias = Callable[[int, float, np.random.Generator], Trace]


class TraceKind(NamedTuple):
    summary: str
    generate: Generate
    num_requests: int  # default
    rate_per_s: float


KINDS = {
    "chat": TraceKind("conversations of several turns behind one system prompt", ChatSpec().generate, 10_000, 3.0),
    "documents": TraceKind(
        "questions about documents, some asked far more than others", DocumentsSpec().generate, 10_000, 3.0
    ),
    "agents": TraceKind(
        "agents with long shared instructions and many short steps", AgentsSpec().generate, 10_000, 6.0
    ),
    "synthetic": TraceKind("the paper's synthetic mix", synthetic_mix, SYNTHETIC_REQUESTS, SYNTHETIC_RATE_PER_S),
    "tool-agent": TraceKind(
        "like the paper's Tool&Agent trace", tool_agent, TOOL_AGENT_REQUESTS, TOOL_AGENT_RATE_PER_S
    ),
}


def generate(
    kind: str,
    *,
    num_requests: int | None = None,
    rate_per_s: float | None = None,
    seed: int = 0,
    arrivals: Arrivals | None = None,
) -> Trace:
    """Generate a trace; None means the default of the kind. Raise InvalidInput for an unknown kind."""
    if kind not in KINDS:
        raise InvalidInput(f"no kind of trace is called {kind!r}; there are {', '.join(KINDS)}")
    chosen = KINDS[kind]
    return _draw(
        chosen.generate,
        chosen.num_requests if num_requests is None else num_requests,
        chosen.rate_per_s if rate_per_s is None else rate_per_s,
        seed,
        arrivals,
    )


def generate_like(
    trace: Trace,
    *,
    num_requests: int | None = None,
    rate_per_s: float | None = None,
    seed: int = 0,
    arrivals: Arrivals | None = None,
) -> Trace:
    """Generate traffic fitted to this trace; None means the trace's own value."""
    spec = fit(trace)
    made = _draw(
        spec.generate,
        len(trace) if num_requests is None else num_requests,
        len(trace) / trace.duration_s if rate_per_s is None else rate_per_s,
        seed,
        arrivals,
    )
    return made.replace(name=f"like-{trace.name}")


def _draw(make: Generate, num_requests: int, rate_per_s: float, seed: int, arrivals: Arrivals | None) -> Trace:
    if not 1 <= num_requests <= MAX_REQUESTS:
        raise InvalidInput(f"{num_requests} requests cannot be made; 1 to {MAX_REQUESTS} can")
    if seed < 0:
        raise InvalidInput(f"a seed cannot be {seed}; take 0 or more")
    rng = np.random.default_rng(seed)
    trace = make(num_requests, rate_per_s, rng)
    return trace if arrivals is None else change_rate(trace, rate_per_s, arrivals, rng)
