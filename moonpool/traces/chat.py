"""Chat: conversations of several turns behind one system prompt, each turn with the whole history in front of it."""

from __future__ import annotations

import msgspec
import numpy as np

from moonpool.traces.arrivals import POISSON, Arrivals
from moonpool.traces.columns import MOONCAKE_BLOCK_TOKENS, Trace
from moonpool.traces.prefixes import to_trace
from moonpool.traces.quantiles import Quantiles, by_percent
from moonpool.traces.sessions import Beginnings, SessionTurns, plan_sessions

_FIRST_MESSAGE = by_percent({0: 50, 25: 450, 50: 2150, 75: 7150, 90: 19150, 98: 49150, 100: 99150})
_OUTPUT = by_percent({0: 1, 5: 10, 25: 150, 50: 350, 75: 470, 95: 700, 99: 1100, 100: 2000})
_THINK_S = by_percent({0: 5, 10: 40, 25: 65, 50: 120, 75: 260, 90: 480, 98: 1200, 100: 3000})
_MESSAGE = by_percent({0: 3, 25: 8, 50: 25, 75: 400, 90: 4000, 98: 12000, 100: 40000})


class Stem(msgspec.Struct, frozen=True):
    """What conversations begin with, the system prompt included, and how often they do, compared with other stems."""

    tokens: int
    weight: float


class ChatSpec(msgspec.Struct, frozen=True, kw_only=True, tag="chat"):
    """What a chat service's traffic is like. Without `stems`, all begin with the system prompt and nothing else."""

    system_tokens: int = 850
    stems: tuple[Stem, ...] = ()
    first_message: Quantiles = _FIRST_MESSAGE  # tokens behind the stem
    output: Quantiles = _OUTPUT
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
            Beginnings(first_input, stem, stem_tokens),
            self.turns,
            self.output,
            num_requests=num_requests,
            rate_per_s=rate_per_s,
            arrivals=self.arrivals,
            rng=rng,
        )
        return to_trace(plan, name=name, common_tokens=self.system_tokens, block_tokens=self.block_tokens)
