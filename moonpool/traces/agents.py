"""Agents with tools: a few kinds of agents, each with long instructions that all its tasks share, and many short steps.

A step's input is all before it, what the model said, and what the tool answered. Steps follow each other quickly, and
tasks come in bursts.
"""

from __future__ import annotations

import msgspec
import numpy as np

from moonpool.traces.arrivals import Arrivals
from moonpool.traces.columns import MOONCAKE_BLOCK_TOKENS, Trace
from moonpool.traces.popularity import draw_zipf
from moonpool.traces.prefixes import to_trace
from moonpool.traces.quantiles import Quantiles, by_percent
from moonpool.traces.sessions import Beginnings, SessionTurns, plan_sessions

_INSTRUCTIONS = by_percent({0: 1000, 50: 4000, 90: 9000, 100: 16000})
_TASK = by_percent({0: 30, 25: 200, 50: 700, 75: 2000, 95: 10000, 100: 40000})
_OUTPUT = by_percent({0: 3, 25: 20, 50: 40, 75: 250, 95: 600, 100: 2000})
_TOOL_S = by_percent({0: 1, 25: 3, 50: 6, 75: 15, 95: 60, 100: 300})
_TOOL_ANSWER = by_percent({0: 20, 50: 200, 75: 600, 95: 3000, 100: 15000})


class AgentsSpec(msgspec.Struct, frozen=True, kw_only=True, tag="agents"):
    """What the agents are like. `common_tokens` are those with which the instructions of all of them begin."""

    common_tokens: int = 512
    num_agents: int = 20
    exponent: float = 1.0  # of Zipf's law
    instruction_tokens: Quantiles = _INSTRUCTIONS  # per kind of agent, beside the common ones
    task_tokens: Quantiles = _TASK
    output: Quantiles = _OUTPUT
    turns: SessionTurns = SessionTurns(go_on=((0.85,),), think_s=_TOOL_S, added_tokens=_TOOL_ANSWER)
    arrivals: Arrivals = Arrivals(cv=2.0)
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def generate(self, num_requests: int, rate_per_s: float, rng: np.random.Generator, name: str = "agents") -> Trace:
        lengths = self.common_tokens + self.instruction_tokens.spread_tokens(self.num_agents, rng)
        agent = draw_zipf(self.num_agents, self.exponent, num_requests, rng)
        task_tokens = np.maximum(self.task_tokens.draw_tokens(num_requests, rng), 1)
        plan = plan_sessions(
            Beginnings(lengths[agent] + task_tokens, stem=agent, stem_tokens=lengths[agent]),
            self.turns,
            self.output,
            num_requests=num_requests,
            rate_per_s=rate_per_s,
            arrivals=self.arrivals,
            rng=rng,
        )
        return to_trace(plan, name=name, common_tokens=self.common_tokens, block_tokens=self.block_tokens)
