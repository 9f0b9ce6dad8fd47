"""How many tokens answers have, learnt per tenant: a small histogram each, so that memory is bounded. Pure.

Buckets grow by a quarter, so a length is known to about 12 %. Counts fade, half of them within about 350 answers. A
tenant with few answers so far is mixed with all tenants together; before any answer at all, an answer is taken to
have half of what it may have.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

_GROWTH = 1.25
_NUM_BUCKETS = 70  # up to about six million tokens
_FADE = 0.998
_OTHERS_WEIGHT = 20.0  # what is known of all tenants counts as this many answers of one
_LOG_GROWTH = math.log(_GROWTH)
_EDGES = _GROWTH ** np.arange(_NUM_BUCKETS + 1)  # bucket b has lengths from edge b to edge b + 1


def _bucket_of(num_tokens: int) -> int:
    return min(_NUM_BUCKETS - 1, int(math.log(max(1, num_tokens)) / _LOG_GROWTH))


class LengthHistogram:
    """Faded counts of lengths; 70 floats twice, however many lengths it has seen."""

    __slots__ = ("_counts", "_scale", "_tokens", "total")

    def __init__(self) -> None:
        self._counts = [0.0] * _NUM_BUCKETS
        self._tokens = [0.0] * _NUM_BUCKETS  # sums, so that means are exact within a bucket
        self._scale = 1.0  # a new answer's weight grows instead of all the old ones shrinking
        self.total = 0.0

    def add(self, num_tokens: int) -> None:
        bucket = _bucket_of(num_tokens)
        self._scale /= _FADE
        self._counts[bucket] += self._scale
        self._tokens[bucket] += self._scale * num_tokens
        self.total += self._scale
        if self._scale > 1e6:
            self._renormalise()

    @property
    def weight(self) -> float:
        """How many answers it is worth."""
        return self.total / self._scale

    def up_to(self, cap: int) -> tuple[float, float]:
        """(answers, their tokens), none counted longer than cap."""
        tokens = sum([min(tokens, count * cap) for count, tokens in zip(self._counts, self._tokens, strict=True)])
        return self.weight, tokens / self._scale

    def longer_than(self, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """The share of answers that are; within a bucket they are taken to be spread evenly."""
        if not self.total:
            return np.zeros_like(num_tokens)
        shorter = np.concatenate([[0.0], np.cumsum(self._counts)]) / self.total
        return 1.0 - np.interp(num_tokens, _EDGES, shorter)

    def _renormalise(self) -> None:
        self._counts = [count / self._scale for count in self._counts]
        self._tokens = [tokens / self._scale for tokens in self._tokens]
        self.total, self._scale = self.total / self._scale, 1.0


class OutputLengths:
    """Of each of the `max_tenants` tenants that were heard of last, and of all together."""

    def __init__(self, max_tenants: int = 1024) -> None:
        assert max_tenants > 0
        self._max_tenants = max_tenants
        self._all = LengthHistogram()
        self._tenants: OrderedDict[str, LengthHistogram] = OrderedDict()

    def learn(self, tenant: str, num_tokens: int) -> None:
        self._all.add(num_tokens)
        own = self._tenants.pop(tenant, None) or LengthHistogram()
        own.add(num_tokens)
        self._tenants[tenant] = own
        if len(self._tenants) > self._max_tenants:
            self._tenants.popitem(last=False)

    def expected(self, tenant: str, max_tokens: int) -> float:
        """The mean length of answers, none counted longer than max_tokens."""
        count, tokens = self._all.up_to(max_tokens)
        if count > _OTHERS_WEIGHT:
            count, tokens = _OTHERS_WEIGHT, tokens * _OTHERS_WEIGHT / count
        own = self._tenants.get(tenant)
        if own is not None:
            own_count, own_tokens = own.up_to(max_tokens)
            count, tokens = count + own_count, tokens + own_tokens
        return tokens / count if count else max_tokens / 2
