"""What a worker measures between two reports, and how sampled tokens look to others."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from moonpool.base.cluster import DecodeSample, PrefillSample, PullSample
from moonpool.engine.sampler import SampledToken
from moonpool.worker.messages import TokenOut
from moonpool.worker.metrics import WorkerTimes

_KEEP = 64


@dataclass(slots=True)
class Samples:
    """Bounded: a conductor that does not listen costs no memory."""

    prefills: deque[PrefillSample] = field(default_factory=lambda: deque(maxlen=_KEEP))
    decodes: deque[DecodeSample] = field(default_factory=lambda: deque(maxlen=_KEEP))
    pulls: deque[PullSample] = field(default_factory=lambda: deque(maxlen=_KEEP))
    pull_failures: Counter[str] = field(default_factory=Counter)
    handoff_nbytes: int = 0
    times: WorkerTimes = field(default_factory=WorkerTimes)
    failed_requests: int = 0  # that ended with an error of their own


def token_out(sampled: SampledToken) -> TokenOut:
    """The token as it goes to the front end."""
    return TokenOut(sampled.token, sampled.logprob, sampled.top_logprobs)
