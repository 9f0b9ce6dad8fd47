"""Shared documents: every request is a question about a document, and some are asked about far more than others."""

from __future__ import annotations

import msgspec
import numpy as np

from moonpool.traces.arrivals import POISSON, Arrivals, draw_arrivals
from moonpool.traces.columns import MOONCAKE_BLOCK_TOKENS, Trace
from moonpool.traces.popularity import draw_zipf
from moonpool.traces.prefixes import ROOT, PrefixPlan, to_trace
from moonpool.traces.quantiles import Quantiles, by_percent

_DOCUMENT = by_percent({0: 2000, 25: 8000, 50: 18000, 75: 30000, 95: 60000, 100: 120000})
_QUESTION = by_percent({0: 10, 50: 60, 90: 200, 100: 800})
_ANSWER = by_percent({0: 1, 25: 10, 50: 50, 75: 120, 95: 400, 100: 900})


class DocumentsSpec(msgspec.Struct, frozen=True, kw_only=True, tag="documents"):
    """What is asked about what."""

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
