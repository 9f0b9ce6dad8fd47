"""How many tokens answers have, learnt per tenant: a small histogram each, so that memory is bounded. Pure.

Buckets grow by a quarter, so a length is known to about 12 %. Counts fade, half of them within about 350 answers. A
tenant with few answers so far is mixed with all tenants together; before any answer at all, an answer is taken to
have half of what it may have.
"""

from __future__ import annotations

import math
from collections import OrderedDict

_GROWTH = 1.25
_NUM_BUCKETS = 70  # up to about six million tokens
_FADE = 0.998
_OTHERS_WEIGHT = 20.0  # what is known of all tenants counts as this many answers of one
_LOG_GROWTH = math.log(_GROWTH)


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

    def beyond(self, num_tokens: int, cap: int) -> tuple[float, float]:
        """(answers, their tokens) of those in buckets after that of num_tokens, none counted longer than cap."""
        count = tokens = 0.0
        for bucket in range(_bucket_of(num_tokens) + 1 if num_tokens else 0, _NUM_BUCKETS):
            if self._counts[bucket]:
                count += self._counts[bucket]
                tokens += min(self._tokens[bucket], self._counts[bucket] * cap)
        return count / self._scale, tokens / self._scale

    def quantile(self, share: float) -> int | None:
        """The mean length in the bucket where that share of the answers is reached; None before any."""
        left = share * self.total
        last: int | None = None
        for count, tokens in zip(self._counts, self._tokens, strict=True):
            if count:
                last = round(tokens / count)
                left -= count
                if left <= 0:
                    break
        return last

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

    def expected(self, tenant: str, max_tokens: int, done_tokens: int = 0) -> float:
        """The mean length of answers that went on beyond done_tokens, never above max_tokens."""
        count, tokens = self._all.beyond(done_tokens, max_tokens)
        if count > _OTHERS_WEIGHT:
            count, tokens = _OTHERS_WEIGHT, tokens * _OTHERS_WEIGHT / count
        own = self._tenants.get(tenant)
        if own is not None:
            own_count, own_tokens = own.beyond(done_tokens, max_tokens)
            count, tokens = count + own_count, tokens + own_tokens
        if not count:
            return (done_tokens + max_tokens) / 2 if done_tokens < max_tokens else float(max_tokens)
        return min(float(max_tokens), max(float(done_tokens), tokens / count))

    def quantile(self, tenant: str, share: float) -> int | None:
        """Of the tenant's own answers; of all tenants' where it has none; None before any."""
        return self._tenants.get(tenant, self._all).quantile(share)
