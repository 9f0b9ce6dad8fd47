"""How many requests will be decoding at a later moment: what the prediction-based form of admission asks. Pure.

Each request is told of three times: `expect` when it is sent to prefill, `join` when decoding starts, `end` when it is
over, however it ends. Two forms have these calls: `SystemForecast` here, and `RequestForecast`
(request_forecast.py), which is what the conductor asks.

`SystemForecast` is the paper's: every request decodes for the same time t_d; at t, those whose prefill has ended
by then are there and those that have decoded t_d or longer are not. t_d is the mean of measured decode times, where
a sample fades by 2 % with each later one; it starts at `initial_decode_s`, which counts as `_INITIAL_SAMPLES`
samples and fades with them, so that a handful of short answers that are over first cannot pull it down at once. One
known fault of the rule stays: requests that decode longer than the mean are left out too early.

It answers in O(log n), whatever the number n of open requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from moonpool.base.errors import ConfigError
from moonpool.conductor.admission.time_sums import TimeSums

_FADE = 0.98
_INITIAL_SAMPLES = 8.0
_ONE_SEQ = 1 << 48  # a weight is number of sequences x 2^48 + tokens: one tree sums both


class DecodeLoad(NamedTuple):
    """All requests that decode at a moment, over all decode workers, and the KV of their prompts. Expected numbers
    are no whole ones."""

    num_seqs: float
    kv_tokens: float


class DecodeForecast(Protocol):
    """What admission needs, and what the conductor tells it. Calls about unknown requests are ignored."""

    def expect(self, request: ExpectedDecode, now_s: float) -> None: ...

    def join(self, request_id: str, now_s: float) -> None: ...

    def end(self, request_id: str, now_s: float, output_tokens: int = 0) -> None:
        """Decode times are learnt from requests that had joined and have output_tokens."""
        ...

    def at(self, at_s: float, now_s: float) -> DecodeLoad:
        """The load predicted for at_s, which is not before now_s."""
        ...

    def over_by_s(self, now_s: float) -> float:
        """A moment by which next to all that is open now is predicted to be over."""
        ...


class ExpectedDecode(NamedTuple):
    request_id: str
    prefill_ends_s: float
    kv_tokens: int
    max_tokens: int = 0
    tenant: str = ""


class FadedMean:
    """A mean that follows: each sample weighs 2 % less with each later one. `usual_weight` is that of one sample."""

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
    """One decode time for all, as in the paper."""

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
        """t_d: the time for which a request is taken to decode."""
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
            # A prefill that is late ends now at the earliest, so before that none of them is over.
            weight -= self._pending.until(gone_if_started_s)
        return DecodeLoad(*divmod(weight, _ONE_SEQ))

    def over_by_s(self, now_s: float) -> float:
        return max(now_s, self._last_start_s) + self.decode_s + 1e-2  # and a tick or two
