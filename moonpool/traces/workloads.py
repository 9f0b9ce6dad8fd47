"""Parameters of three kinds of traffic, each of which generates traces.

Chat: conversations of several turns after one system prompt; each turn begins with the whole history.
Documents: every request is a question about a document; some documents are asked about far more often than others.
Agents: a few kinds of agents with long instructions that all their tasks share, and many short steps. The input of a
step is all previous input, the model's output and the tool's output. Steps follow quickly; tasks come in bursts.
"""

from __future__ import annotations

import msgspec
import numpy as np

from moonpool.traces.columns import MOONCAKE_BLOCK_TOKENS, Trace
from moonpool.traces.distributions import POISSON, Arrivals, Quantiles, by_percent, draw_arrivals, draw_zipf
from moonpool.traces.sessions import ROOT, PrefixPlan, SessionStarts, SessionTurns, plan_sessions, to_trace

_FIRST_MESSAGE = by_percent({0: 50, 25: 450, 50: 2150, 75: 7150, 90: 19150, 98: 49150, 100: 99150})
_CHAT_OUTPUT = by_percent({0: 1, 5: 10, 25: 150, 50: 350, 75: 470, 95: 700, 99: 1100, 100: 2000})
_THINK_S = by_percent({0: 5, 10: 40, 25: 65, 50: 120, 75: 260, 90: 480, 98: 1200, 100: 3000})
_MESSAGE = by_percent({0: 3, 25: 8, 50: 25, 75: 400, 90: 4000, 98: 12000, 100: 40000})


class Stem(msgspec.Struct, frozen=True):
    """What conversations begin with, including the system prompt; `weight` is relative to other stems."""

    tokens: int
    weight: float


class ChatSpec(msgspec.Struct, frozen=True, kw_only=True, tag="chat"):
    """Traffic of a chat service. Without `stems`, conversations share only the system prompt."""

    system_tokens: int = 850
    stems: tuple[Stem, ...] = ()
    first_message: Quantiles = _FIRST_MESSAGE  # tokens after the stem
    output: Quantiles = _CHAT_OUTPUT
    turns: SessionTurns = SessionTurns(go_on=((0.5,), (0.7,)), think_s=_THINK_S, added_tokens=_MESSAGE)
    arrivals: Arrivals = POISSON
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def generate(self, num_requests: int, rate_per_s: float, rng: np.random.Generator, name: str = "chat") -> Trace:
        stems = self.stems or (Stem(self.system_tokens, 1.0),)
        reached = np.cumsum([stem.weight for stem in stems])
        stem = np.searchsorted(reached[:-1], rng.random(num_requests) * reached[-1], side="right")
        stem_tokens = np.array([stem.tokens for stem in stems], np.int64)[stem]
        first_input = stem_tokens + np.maximum(self.first_message.draw_tokens(num_requests, rng), 1)
        plan = plan_sessions(
            SessionStarts(first_input, stem, stem_tokens),
            self.turns,
            self.output,
            num_requests=num_requests,
            rate_per_s=rate_per_s,
            arrivals=self.arrivals,
            rng=rng,
        )
        return to_trace(plan, name=name, common_tokens=self.system_tokens, block_tokens=self.block_tokens)


_DOCUMENT = by_percent({0: 2000, 25: 8000, 50: 18000, 75: 30000, 95: 60000, 100: 120000})
_QUESTION = by_percent({0: 10, 50: 60, 90: 200, 100: 800})
_ANSWER = by_percent({0: 1, 25: 10, 50: 50, 75: 120, 95: 400, 100: 900})


class DocumentsSpec(msgspec.Struct, frozen=True, kw_only=True, tag="documents"):
    """Traffic of questions about documents."""

    system_tokens: int = 0
    num_documents: int = 1000
    exponent: float = 0.9  # of Zipf's law
    document_tokens: Quantiles = _DOCUMENT
    question_tokens: Quantiles = _QUESTION
    output: Quantiles = _ANSWER
    arrivals: Arrivals = POISSON
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def generate(
        self, num_requests: int, rate_per_s: float, rng: np.random.Generator, name: str = "documents"
    ) -> Trace:
        lengths = self.system_tokens + self.document_tokens.spread_tokens(self.num_documents, rng)
        asked = draw_zipf(self.num_documents, self.exponent, num_requests, rng)
        plan = PrefixPlan(
            draw_arrivals(self.arrivals, num_requests, rate_per_s, rng),
            num_input=lengths[asked] + np.maximum(self.question_tokens.draw_tokens(num_requests, rng), 1),
            num_output=np.maximum(self.output.draw_tokens(num_requests, rng), 1),
            parent=np.full(num_requests, ROOT, np.int64),
            kept_tokens=np.zeros(num_requests, np.int64),
            stem=asked,
            stem_tokens=lengths[asked],
        )
        return to_trace(plan, name=name, common_tokens=self.system_tokens, block_tokens=self.block_tokens)


_INSTRUCTIONS = by_percent({0: 1000, 50: 4000, 90: 9000, 100: 16000})
_TASK = by_percent({0: 30, 25: 200, 50: 700, 75: 2000, 95: 10000, 100: 40000})
_AGENT_OUTPUT = by_percent({0: 3, 25: 20, 50: 40, 75: 250, 95: 600, 100: 2000})
_TOOL_S = by_percent({0: 1, 25: 3, 50: 6, 75: 15, 95: 60, 100: 300})
_TOOL_ANSWER = by_percent({0: 20, 50: 200, 75: 600, 95: 3000, 100: 15000})


class AgentsSpec(msgspec.Struct, frozen=True, kw_only=True, tag="agents"):
    """Traffic of agents. The instructions of all agents begin with the same `common_tokens` tokens."""

    common_tokens: int = 512
    num_agents: int = 20
    exponent: float = 1.0  # of Zipf's law
    instruction_tokens: Quantiles = _INSTRUCTIONS  # per kind of agent, without the common ones
    task_tokens: Quantiles = _TASK
    output: Quantiles = _AGENT_OUTPUT
    turns: SessionTurns = SessionTurns(go_on=((0.85,),), think_s=_TOOL_S, added_tokens=_TOOL_ANSWER)
    arrivals: Arrivals = Arrivals(cv=2.0)
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    def generate(self, num_requests: int, rate_per_s: float, rng: np.random.Generator, name: str = "agents") -> Trace:
        lengths = self.common_tokens + self.instruction_tokens.spread_tokens(self.num_agents, rng)
        agent = draw_zipf(self.num_agents, self.exponent, num_requests, rng)
        task_tokens = np.maximum(self.task_tokens.draw_tokens(num_requests, rng), 1)
        plan = plan_sessions(
            SessionStarts(lengths[agent] + task_tokens, stem=agent, stem_tokens=lengths[agent]),
            self.turns,
            self.output,
            num_requests=num_requests,
            rate_per_s=rate_per_s,
            arrivals=self.arrivals,
            rng=rng,
        )
        return to_trace(plan, name=name, common_tokens=self.common_tokens, block_tokens=self.block_tokens)
