"""Forecasts decode load request by request: each counts with the probability that its answer still goes on. Pure.

The probability follows from the lengths of earlier answers, those of the request's tenant up to its own max_tokens, and
from the measured time per token. A forecast that ended every request at the mean length would leave out the long
answers, which are most of what decodes at any moment: half of all tokens are in the longest quarter of the answers.

Lengths (LengthHistogram, OutputLengths). Buckets grow by a quarter, so a length is known to about 12 %. Counts fade;
half of the weight is gone after about 350 answers. A tenant with few answers is mixed with all tenants together. Before
any answer, 128 tokens are expected, or max_tokens if that is less: max_tokens says little about an answer's length, and
a client that does not set it asks for all that the context has room for.

Time (LengthClass). Requests whose expected length is alike to a factor of two share one class, across tenants. Time
is cut in steps of 1/4 s, up to 256 s back and ahead; older answers count as 256 s old. A class counts the requests that
decode by age and those still to come by the step of their start, in arrays that shift as time passes. So a forecast is
one product with the survival curve, P(an answer still goes on) by age, and costs a few microseconds for a hundred
open requests as for a hundred thousand.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import ConfigError
from moonpool.conductor.admission.forecast import DecodeLoad, ExpectedDecode, FadedMean

STEP_S = 0.25
NUM_STEPS = 1024
_GUESS_WEIGHT = 8.0  # the first guess counts as this many answers
_RELEARN = 16  # answers after which the survival curve is computed again

Counts = NDArray[np.float64]  # rows: sequences, tokens of their KV; columns: steps


def step_of(at_s: float) -> int:
    return int(at_s // STEP_S)


class LengthClass:
    """Requests of about the same expected length.

    The first guess of the survival curve is P(longer than x) = (mean / (mean + x))^2: an answer that has gone on for
    long may go on for as long again. It never falls to 0, so an answer longer than all before it still counts.
    """

    def __init__(self, mean_tokens: float, now_step: int) -> None:
        self._mean_tokens = mean_tokens
        self._lengths = LengthHistogram()
        self._num_new = _RELEARN  # the survival curve is not computed yet
        self._survival = np.ones(2 * NUM_STEPS)
        self._now = now_step
        self.num_open = 0
        self._decoding: Counts = np.zeros((2, NUM_STEPS))  # by age
        self._coming: Counts = np.zeros((2, NUM_STEPS))  # by steps from now; a late request counts for the next step

    def learn(self, num_tokens: int) -> None:
        self._lengths.add(num_tokens)
        self._num_new += 1

    def count_coming(self, starts: int, kv_tokens: int, sign: int) -> None:
        """Add (sign 1) or remove (sign -1) a request that has not joined yet."""
        self.num_open += sign
        self._coming[:, max(1, starts - self._now)] += (sign, sign * kv_tokens)

    def count_decoding(self, started: int, kv_tokens: int, sign: int) -> None:
        self.num_open += sign
        self._decoding[:, min(NUM_STEPS - 1, self._now - started)] += (sign, sign * kv_tokens)

    def advance(self, now_step: int) -> None:
        passed = min(now_step - self._now, NUM_STEPS - 1)
        if passed <= 0:
            return
        self._now = now_step
        if not self.num_open:
            return
        decoding, coming = np.zeros_like(self._decoding), np.zeros_like(self._coming)
        decoding[:, passed:] = self._decoding[:, :-passed]
        decoding[:, -1] += self._decoding[:, -passed:].sum(axis=1)
        coming[:, :-passed] = self._coming[:, passed:]
        coming[:, 1] += coming[:, 0] + self._coming[:, :passed].sum(axis=1)
        coming[:, 0] = 0.0
        self._decoding, self._coming = decoding, coming

    def expected(self, ahead: int, token_s: float) -> Counts:
        """Return the expected (sequences, tokens of KV) `ahead` steps from now."""
        if self._num_new >= _RELEARN:
            self._compute_survival(token_s)
        survival, ahead = self._survival, min(ahead, NUM_STEPS - 1)
        stays = survival[ahead : ahead + NUM_STEPS] / survival[:NUM_STEPS]
        load: Counts = self._decoding @ stays
        if ahead:
            load += self._coming[:, 1 : ahead + 1] @ survival[ahead - 1 :: -1]
        return load

    def _compute_survival(self, token_s: float) -> None:
        tokens: NDArray[np.float64] = np.arange(2 * NUM_STEPS, dtype=np.float64) * (STEP_S / token_s)
        guess = (self._mean_tokens / (self._mean_tokens + tokens)) ** 2
        weight = self._lengths.weight
        learnt = self._lengths.longer_than(tokens)
        self._survival = (_GUESS_WEIGHT * guess + weight * learnt) / (_GUESS_WEIGHT + weight)
        self._num_new = 0


_GROWTH = 1.25
_NUM_BUCKETS = 70  # up to about six million tokens
_FADE = 0.998
_OTHERS_WEIGHT = 20.0  # the lengths of all tenants count as this many answers of one tenant
_LOG_GROWTH = math.log(_GROWTH)
_EDGES = _GROWTH ** np.arange(_NUM_BUCKETS + 1)  # bucket b holds lengths from edge b to edge b + 1


def _bucket_of(num_tokens: int) -> int:
    return min(_NUM_BUCKETS - 1, int(math.log(max(1, num_tokens)) / _LOG_GROWTH))


class LengthHistogram:
    """Fading counts of lengths, in 2 x 70 floats for any number of lengths."""

    __slots__ = ("_counts", "_scale", "_tokens", "total")

    def __init__(self) -> None:
        self._counts = [0.0] * _NUM_BUCKETS
        self._tokens = [0.0] * _NUM_BUCKETS  # sums, so that means are exact within a bucket
        self._scale = 1.0  # the weight of new answers grows, instead of all old weights shrinking
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
        """The counted answers, each by its faded weight."""
        return self.total / self._scale

    @property
    def mean(self) -> float:
        return sum(self._tokens) / self.total

    def up_to(self, cap: int) -> tuple[float, float]:
        """Return (answers, their tokens); longer answers count as `cap` tokens."""
        at = _bucket_of(cap)
        longer = self._tokens[at] if self._tokens[at] < self._counts[at] * cap else self._counts[at] * cap
        tokens = sum(self._tokens[:at]) + longer + cap * sum(self._counts[at + 1 :])
        return self.weight, tokens / self._scale

    def longer_than(self, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the share of answers that are longer; lengths are assumed to be spread evenly within a bucket."""
        if not self.total:
            return np.zeros_like(num_tokens)
        shorter = np.concatenate([[0.0], np.cumsum(self._counts)]) / self.total
        return 1.0 - np.interp(num_tokens, _EDGES, shorter)

    def _renormalise(self) -> None:
        self._counts = [count / self._scale for count in self._counts]
        self._tokens = [tokens / self._scale for tokens in self._tokens]
        self.total, self._scale = self.total / self._scale, 1.0


_GUESSED_TOKENS = 128  # of an answer, before there was any
_NUM_GUESSED = 8  # the guess counts as this many answers


class OutputLengths:
    """Lengths of the `max_tenants` tenants that had answers last, and of all tenants together."""

    def __init__(self, max_tenants: int = 1024) -> None:
        assert max_tenants > 0
        self._max_tenants = max_tenants
        self._all = LengthHistogram()
        for _ in range(_NUM_GUESSED):
            self._all.add(_GUESSED_TOKENS)
        self._tenants: OrderedDict[str, LengthHistogram] = OrderedDict()

    @property
    def mean(self) -> float:
        """The mean length of all tenants' answers."""
        return self._all.mean

    def learn(self, tenant: str, num_tokens: int) -> None:
        self._all.add(num_tokens)
        own = self._tenants.pop(tenant, None) or LengthHistogram()
        own.add(num_tokens)
        self._tenants[tenant] = own
        if len(self._tenants) > self._max_tenants:
            self._tenants.popitem(last=False)

    def expected(self, tenant: str, max_tokens: int) -> float:
        """Return the mean length of the tenant's answers; longer answers count as `max_tokens`."""
        count, tokens = self._all.up_to(max_tokens)
        if count > _OTHERS_WEIGHT:
            count, tokens = _OTHERS_WEIGHT, tokens * _OTHERS_WEIGHT / count
        own = self._tenants.get(tenant)
        if own is not None:
            own_count, own_tokens = own.up_to(max_tokens)
            count, tokens = count + own_count, tokens + own_tokens
        return tokens / count


_USUAL_TOKENS = 200.0  # of an answer; the weight of the first guess of the time per token
_OVER_AFTER = 4.0  # few answers are longer than this many times the mean length


@dataclass(slots=True)
class _Open:
    request: ExpectedDecode
    group: LengthClass
    starts: int  # the step at which it begins, or began, to decode
    starts_s: float
    joined: bool = False


class RequestForecast:
    """A DecodeForecast with a resolution of a quarter of a second. The caller teaches `lengths`."""

    def __init__(self, lengths: OutputLengths, initial_token_s: float = 0.06) -> None:
        if not initial_token_s > 0:
            raise ConfigError("the first guess of a time per token must be above 0", param="initial_token_s")
        self._lengths = lengths
        self._token_s = FadedMean(initial_token_s, _USUAL_TOKENS)
        self._open: dict[str, _Open] = {}
        self._groups: dict[int, LengthClass] = {}  # by the logarithm of the expected length
        self._now = 0  # the step that all groups are advanced to
        self._over_by_s = 0.0

    def expect(self, request: ExpectedDecode, now_s: float) -> None:
        self.end(request.request_id, now_s)
        mean_tokens = self._lengths.expected(request.tenant, max(1, request.max_tokens))
        starts = min(step_of(request.prefill_ends_s), self._now + NUM_STEPS - 1)
        one = _Open(request, self._group(mean_tokens), starts, request.prefill_ends_s)
        one.group.count_coming(starts, request.kv_tokens, 1)
        self._open[request.request_id] = one
        over_s = request.prefill_ends_s + _OVER_AFTER * mean_tokens * self._token_s.value
        self._over_by_s = max(self._over_by_s, over_s)

    def join(self, request_id: str, now_s: float) -> None:
        one = self._open.get(request_id)
        if one is None or one.joined:
            return
        self._advance(now_s)
        one.group.count_coming(one.starts, one.request.kv_tokens, -1)
        one.joined, one.starts, one.starts_s = True, self._now, now_s
        one.group.count_decoding(one.starts, one.request.kv_tokens, 1)

    def end(self, request_id: str, now_s: float, output_tokens: int = 0) -> None:
        self._advance(now_s)
        one = self._open.pop(request_id, None)
        if one is None:
            return
        count = one.group.count_decoding if one.joined else one.group.count_coming
        count(one.starts, one.request.kv_tokens, -1)
        if one.joined and output_tokens:
            self._token_s.add(now_s - one.starts_s, output_tokens)
            one.group.learn(output_tokens)

    def at(self, at_s: float, now_s: float) -> DecodeLoad:
        self._advance(now_s)
        ahead, token_s, load = max(0, step_of(at_s) - self._now), self._token_s.value, np.zeros(2)
        for group in self._groups.values():
            if group.num_open:
                load += group.expected(ahead, token_s)
        return DecodeLoad(load.item(0), load.item(1))

    def over_by_s(self, now_s: float) -> float:
        return max(now_s, self._over_by_s) + STEP_S

    def _group(self, mean_tokens: float) -> LengthClass:
        size = round(math.log2(max(1.0, mean_tokens)))
        if size not in self._groups:
            self._groups[size] = LengthClass(2.0**size, self._now)
        return self._groups[size]

    def _advance(self, now_s: float) -> None:
        now = step_of(now_s)
        if now > self._now:
            self._now = now
            for group in self._groups.values():
                group.advance(now)
