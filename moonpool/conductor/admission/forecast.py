"""Forecasts how many requests decode at a later moment, for the forms of admission that look ahead. Pure.

Each request is reported three times: `expect` when it is sent to prefill, `join` when it begins to decode, `end` when
it is over for any reason. Two forecasts have these calls: SystemForecast, here, and RequestForecast
(request_forecast.py).

SystemForecast is the paper's rule: every request decodes for the same time t_d. At a moment t, the requests whose
prefill has ended by t count, and those that have decoded for t_d or longer do not. t_d is the mean of the measured
decode times, in which each sample loses 2 % of its weight with each later one. It starts at `initial_decode_s` with the
weight of `_INITIAL_SAMPLES` samples, so that the first few short answers do not pull it down at once. The rule has one
known fault: requests that decode longer than the mean are left out too early.

SystemForecast answers in O(log n) for n open requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from moonpool.base.errors import ConfigError

TICKS_PER_S = 1024


def tick_of(at_s: float) -> int:
    return int(at_s * TICKS_PER_S // 1)


class TimeSums:
    """Sums of integer weights at or before a moment, added, removed and summed in O(log time).

    A binary indexed tree over ticks of 1/1024 s (moments are rounded down) that keeps only nodes that are not zero, so
    its memory follows the entries (at most one node per entry and doubling of time) and a process may run for years.
    """

    __slots__ = ("_nodes", "_size", "_total")

    def __init__(self) -> None:
        self._nodes: dict[int, int] = {}
        self._size = 1 << 16  # a power of two; nodes have the numbers 1.._size
        self._total = 0

    @property
    def total(self) -> int:
        return self._total

    def add(self, at_s: float, weight: int) -> None:
        """Add a weight at a moment; a negative weight removes what was added there."""
        place = tick_of(at_s) + 1
        assert place > 0, "time starts at zero"
        while place > self._size:
            self._grow()
        self._total += weight
        nodes = self._nodes
        while place <= self._size:
            value = nodes.get(place, 0) + weight
            if value:
                nodes[place] = value
            else:
                nodes.pop(place, None)
            place += place & -place

    def until(self, at_s: float) -> int:
        """Return the sum of all weights at or before that moment."""
        place = tick_of(at_s) + 1
        if place >= self._size:
            return self._total
        total, nodes = 0, self._nodes
        while place > 0:
            total += nodes.get(place, 0)
            place &= place - 1
        return total

    def _grow(self) -> None:
        # The new top node sums all; the nodes between the old and the new top are zero.
        self._size *= 2
        if self._total:
            self._nodes[self._size] = self._total


_FADE = 0.98
_INITIAL_SAMPLES = 8.0
_ONE_SEQ = 1 << 48  # a weight is number of sequences x 2^48 + tokens: one tree sums both


class DecodeLoad(NamedTuple):
    """The requests that decode at a moment on all decode workers, and the KV tokens of their prompts. Expected values
    are fractions."""

    num_seqs: float
    kv_tokens: float


class DecodeForecast(Protocol):
    """What admission asks, and what the conductor reports. Unknown requests are ignored."""

    def expect(self, request: ExpectedDecode, now_s: float) -> None: ...

    def join(self, request_id: str, now_s: float) -> None: ...

    def end(self, request_id: str, now_s: float, output_tokens: int = 0) -> None:
        """Decode times are learnt from requests that had joined and have output tokens."""
        ...

    def at(self, at_s: float, now_s: float) -> DecodeLoad:
        """Return the load predicted for `at_s`, which is not before `now_s`."""
        ...

    def over_by_s(self, now_s: float) -> float:
        """Return a moment by which almost all open requests are predicted to be over."""
        ...


class ExpectedDecode(NamedTuple):
    request_id: str
    prefill_ends_s: float
    kv_tokens: int
    max_tokens: int = 0
    tenant: str = ""


class FadedMean:
    """A running mean in which each sample loses 2 % of its weight with each later one. `usual_weight` is the weight of
    a usual sample."""

    __slots__ = ("_sum", "_weight")

    def __init__(self, initial: float, usual_weight: float = 1.0) -> None:
        self._weight = _INITIAL_SAMPLES * usual_weight
        self._sum = initial * self._weight

    @property
    def value(self) -> float:
        return self._sum / self._weight

    def add(self, total: float, weight: float = 1.0) -> None:
        self._sum = self._sum * _FADE + total
        self._weight = self._weight * _FADE + weight


@dataclass(slots=True)
class _Open:
    starts_s: float
    weight: int
    joined: bool = False


class SystemForecast:
    """The paper's rule: one decode time for all requests."""

    def __init__(self, initial_decode_s: float = 20.0) -> None:
        if not initial_decode_s > 0:
            raise ConfigError("the first guess of a decode time must be above 0", param="initial_decode_s")
        self._decode_s = FadedMean(initial_decode_s)
        self._open: dict[str, _Open] = {}
        self._pending = TimeSums()  # by the predicted end of prefill
        self._decoding = TimeSums()  # by the start of decoding
        self._last_start_s = 0.0

    @property
    def decode_s(self) -> float:
        """t_d: how long each request is predicted to decode."""
        return self._decode_s.value

    def expect(self, request: ExpectedDecode, now_s: float) -> None:
        self.end(request.request_id, now_s)
        one = _Open(request.prefill_ends_s, _ONE_SEQ + request.kv_tokens)
        self._open[request.request_id] = one
        self._pending.add(one.starts_s, one.weight)
        self._last_start_s = max(self._last_start_s, one.starts_s)

    def join(self, request_id: str, now_s: float) -> None:
        one = self._open.get(request_id)
        if one is None or one.joined:
            return
        self._pending.add(one.starts_s, -one.weight)
        one.starts_s, one.joined = now_s, True
        self._decoding.add(now_s, one.weight)

    def end(self, request_id: str, now_s: float, output_tokens: int = 0) -> None:
        one = self._open.pop(request_id, None)
        if one is None:
            return
        (self._decoding if one.joined else self._pending).add(one.starts_s, -one.weight)
        if one.joined and output_tokens:
            self._decode_s.add(now_s - one.starts_s)

    def at(self, at_s: float, now_s: float) -> DecodeLoad:
        gone_if_started_s = at_s - self.decode_s
        weight = self._decoding.total - self._decoding.until(gone_if_started_s) + self._pending.until(at_s)
        if gone_if_started_s >= now_s:
            # A late prefill ends now at the earliest, so none of these requests is over before now + t_d.
            weight -= self._pending.until(gone_if_started_s)
        return DecodeLoad(*divmod(weight, _ONE_SEQ))

    def over_by_s(self, now_s: float) -> float:
        return max(now_s, self._last_start_s) + self.decode_s + 1e-2  # plus a few ticks
