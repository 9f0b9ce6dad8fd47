"""Generated replacements for the paper's two traces that are not available, made from what is known about them.

Sources are FAST'25, Table 2 and Fig 9, and shared/facts/paper.md, C: the synthetic mix (ShareGPT, L-Eval and LooGLE in
equal parts, Poisson arrivals) and Tool&Agent. The mix has the percentiles of the original's lengths; of Tool&Agent only
means are known. All else (number of documents and agents, their popularity, the length of sessions) was chosen so that
the hit curves are within five points of the known ones. So means and hit curves are no results, and a comparison of
anything else with the paper must say that the trace was generated.

The third group are arXiv's sets for end-to-end comparisons, of which only mean lengths and the share of cached tokens
are known. The spread of lengths is assumed (documents between a fifth and four times the mean; simulated prompts all of
one length, half of each a prefix shared with others).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.traces.changes import change_rate, label, merge, relabel, slice_count
from moonpool.traces.columns import Trace
from moonpool.traces.distributions import POISSON, Arrivals, Quantiles, by_percent, constant
from moonpool.traces.sessions import SessionTurns
from moonpool.traces.workloads import AgentsSpec, ChatSpec, DocumentsSpec

SYNTHETIC_REQUESTS, SYNTHETIC_RATE_PER_S = 3993, 3.91
TOOL_AGENT_REQUESTS, TOOL_AGENT_RATE_PER_S = 23608, 6.56

_LONG_DOCUMENT = by_percent(
    {
        0: 1000,
        10: 5500,
        25: 11200,
        45: 16800,
        62.5: 22900,
        85: 38000,
        92.5: 48000,
        98.5: 66000,
        99.5: 80000,
        100: 190000,
    }
)
_FEW_DOCUMENTS = by_percent(  # without the longest: among a hundred documents, one of them would dominate the mean
    {0: 1000, 10: 5500, 25: 11200, 45: 16800, 62.5: 22900, 85: 38000, 92.5: 48000, 100: 66000}
)
_LONG_QUESTION = by_percent({0: 10, 50: 60, 90: 300, 100: 1200})
_SHARE_GPT = ChatSpec(  # single short questions; few of them fill a block
    system_tokens=0,
    first_message=by_percent({0: 4, 15: 22, 50: 110, 75: 277, 90: 500, 98: 1000, 100: 3000}),
    output=by_percent({0: 2, 10: 40, 25: 145, 50: 270, 75: 415, 90: 610, 98: 790, 100: 893}),
    turns=SessionTurns(go_on=((0.0,),), think_s=constant(0.0), added_tokens=constant(0.0)),
)
_L_EVAL = DocumentsSpec(  # few documents, many questions on each
    num_documents=92,
    exponent=0.45,
    document_tokens=_FEW_DOCUMENTS,
    question_tokens=_LONG_QUESTION,
    output=by_percent({0: 1, 25: 5, 50: 20, 75: 90, 95: 320, 100: 700}),
)
_LOOGLE = DocumentsSpec(  # many documents, few questions on each
    num_documents=1350,
    exponent=0.4,
    document_tokens=_LONG_DOCUMENT,
    question_tokens=_LONG_QUESTION,
    output=by_percent({0: 1, 25: 8, 50: 25, 75: 70, 95: 200, 100: 500}),
)

_TOOL_AGENT = AgentsSpec(  # the instructions of all agents fit into 100,000 tokens, as Fig 9's first step says
    common_tokens=700,
    num_agents=5,
    exponent=0.77,
    instruction_tokens=by_percent({0: 2800, 100: 3000}),
    task_tokens=by_percent({0: 66, 25: 265, 50: 1000, 75: 3000, 90: 9300, 98: 30000, 100: 67000}),
    output=by_percent({0: 1, 5: 3, 25: 17, 50: 34, 75: 320, 90: 500, 95: 590, 99: 810, 100: 2000}),
    turns=SessionTurns(
        go_on=((0.355,), (0.46,)),
        think_s=by_percent({0: 6, 10: 51, 25: 83, 50: 153, 75: 332, 90: 613, 98: 1532, 100: 3831}),
        added_tokens=by_percent({0: 3, 50: 50, 75: 400, 90: 2500, 98: 8000, 100: 40000}),
    ),
    arrivals=Arrivals(cv=2.0),
)


def synthetic_mix(
    num_requests: int = SYNTHETIC_REQUESTS,
    rate_per_s: float = SYNTHETIC_RATE_PER_S,
    rng: np.random.Generator | None = None,
) -> Trace:
    """Return three equal parts in random order. `rng` None: seed 0."""
    rng = rng or np.random.default_rng(0)
    share = -(-num_requests // 3)
    parts = [spec.generate(share, rate_per_s / 3, rng) for spec in (_SHARE_GPT, _L_EVAL, _LOOGLE)]
    mixed = slice_count(merge(parts), 0, num_requests)
    return label(change_rate(relabel(mixed), rate_per_s, POISSON, rng), name="synthetic")


def tool_agent(
    num_requests: int = TOOL_AGENT_REQUESTS,
    rate_per_s: float = TOOL_AGENT_RATE_PER_S,
    rng: np.random.Generator | None = None,
) -> Trace:
    """Return traffic of a few agents of very different popularity. `rng` None: seed 0."""
    return _TOOL_AGENT.generate(num_requests, rate_per_s, rng or np.random.default_rng(0), name="tool-agent")


class _Set(NamedTuple):
    """Means in tokens; the cached share is of all input tokens. `is_even`: all requests have the same length."""

    num_input: int
    num_output: int
    cached: float
    is_even: bool = False


_ARXIV = {
    "arxiv-summarization": _Set(8088, 229, 0.0),
    "l-eval": _Set(19019, 72, 0.8),
    **{f"simulated-{k}k": _Set(k * 1024, 512, 0.5, is_even=True) for k in (16, 32, 64, 128)},
}
ARXIV_SETS = tuple(_ARXIV)
_SPREAD = by_percent({0: 0.2, 25: 0.55, 50: 0.85, 75: 1.25, 90: 1.75, 98: 2.6, 100: 4.0})  # around a mean of 1
_SIMULATED_PREFIXES = 5  # shared prefixes of simulated prompts; only the first request of each is not cached


def arxiv_set(name: str, num_requests: int, rate_per_s: float, rng: np.random.Generator) -> Trace:
    """Return requests like those of an arXiv set, with Poisson arrivals. Raise InvalidInput for an unknown set."""
    if name not in _ARXIV:
        raise InvalidInput(f"arXiv has no set {name!r}; there are {', '.join(ARXIV_SETS)}")
    like = _ARXIV[name]
    if like.is_even:
        shared, own = constant(like.num_input * like.cached), constant(like.num_input * (1 - like.cached))
        num_documents, output = _SIMULATED_PREFIXES, constant(like.num_output)
    else:
        own = _LONG_QUESTION if like.cached else constant(1.0)
        shared = _around(like.num_input - own.mean)
        num_documents, output = _documents_for(like.cached, num_requests), _around(like.num_output)
    spec = DocumentsSpec(
        num_documents=num_documents,
        exponent=0.0,
        document_tokens=shared,
        question_tokens=own,
        output=output,
    )
    return spec.generate(num_requests, rate_per_s, rng, name=name)


def _around(mean: float) -> Quantiles:
    return _SPREAD.scaled(mean / _SPREAD.mean)


def _documents_for(cached: float, num_requests: int) -> int:
    """Return the number of documents with which this share of the input is cached. It is 10 % lower for the tokens that
    whole blocks leave out. With no share to cache, it is far more than the requests."""
    return max(1, round((1 - cached) * 0.9 * num_requests)) if cached else 1000 * num_requests
