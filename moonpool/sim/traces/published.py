"""Stand-ins for the paper's two traces that are not at hand, made from what is known about them.

FAST'25, Table 2 and Fig 9, and shared/facts/paper.md, C: the synthetic mix (ShareGPT, L-Eval and LooGLE in equal parts,
Poisson arrivals) and Tool&Agent. The mix has the percentiles of the original's lengths; of Tool&Agent only means are
known. Everything else (how many documents and agents, how popular, when sessions go on) was chosen so that the hit
curves are the known ones, within five points. So means and hit curves are no results here, and whoever compares
anything else with the paper must say that the trace was generated.
"""

from __future__ import annotations

import numpy as np

from moonpool.sim.traces.agents import AgentsSpec
from moonpool.sim.traces.arrivals import POISSON, Arrivals
from moonpool.sim.traces.changes import change_rate, label, merge, relabel, slice_count
from moonpool.sim.traces.chat import ChatSpec
from moonpool.sim.traces.columns import Trace
from moonpool.sim.traces.documents import DocumentsSpec
from moonpool.sim.traces.quantiles import by_percent, constant
from moonpool.sim.traces.sessions import Turns

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
_FEW_DOCUMENTS = by_percent(  # the same without the longest: among a hundred, one of them would decide the mean
    {0: 1000, 10: 5500, 25: 11200, 45: 16800, 62.5: 22900, 85: 38000, 92.5: 48000, 100: 66000}
)
_LONG_QUESTION = by_percent({0: 10, 50: 60, 90: 300, 100: 1200})
_SHARE_GPT = ChatSpec(  # single short questions: hardly any of them fills a block
    system_tokens=0,
    first_message=by_percent({0: 4, 15: 22, 50: 110, 75: 277, 90: 500, 98: 1000, 100: 3000}),
    output=by_percent({0: 2, 10: 40, 25: 145, 50: 270, 75: 415, 90: 610, 98: 790, 100: 893}),
    turns=Turns(go_on=((0.0,),), think_s=constant(0.0), added_tokens=constant(0.0)),
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
    turns=Turns(
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
    """Three equal parts in random order. Without a generator, that of seed 0."""
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
    """A few agents of very different popularity. Without a generator, that of seed 0."""
    return _TOOL_AGENT.generate(num_requests, rate_per_s, rng or np.random.default_rng(0), name="tool-agent")
