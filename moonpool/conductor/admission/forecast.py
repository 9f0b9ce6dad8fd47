"""How many requests will be decoding at a later moment: what the prediction-based form of admission asks. Pure.

Two forms, the same calls. Each request is told of three times: `expect` when it is sent to prefill, `join` when
decoding starts, `end` when it is over, however it ends.

`SystemForecast` is the paper's: every request decodes for the same time t_d; at t, those whose prefill has ended
by then are there and those that have decoded t_d or longer are not. t_d is the mean of measured decode times, where
a sample fades by 2 % with each later one; it starts at `initial_decode_s`, which counts as `_INITIAL_SAMPLES`
samples and fades with them, so that a handful of short answers that are over first cannot pull it down at once. One
known fault of the rule stays: requests that decode longer than the mean are left out too early.

`RequestForecast` has an end for each request: the mean length of its tenant's answers up to its own max_tokens, at
the measured time per token. One that is still there when its end has come gets a new one, from the answers that
went on at least as long.

Both answer in O(log n), whatever the number n of open requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from moonpool.base.errors import ConfigError
from moonpool.conductor.admission.output_lengths import OutputLengths
from moonpool.conductor.admission.time_sums import TimeSums, tick_of

_FADE = 0.98
_INITIAL_SAMPLES = 8.0
_ONE_SEQ = 1 << 48  # a weight is number of sequences x 2^48 + tokens: one tree sums both
_LATE_SHARE = 0.25  # what is late is expected after another quarter of the time it has had already
_MIN_LATE_S = 0.05


class DecodeLoad(NamedTuple):
    """All requests that decode at a moment, over all decode workers, and the KV of their prompts."""

    num_seqs: int
    kv_tokens: int


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
        """A moment by which all that is open now is predicted to be over."""
        ...


class ExpectedDecode(NamedTuple):
    request_id: str
    prefill_ends_s: float
    kv_tokens: int
    max_tokens: int = 0
    tenant: str = ""


class FadedMean:
    """A mean that follows: each sample weighs 2 % less with each later one."""

    __slots__ = ("_sum", "_weight")

    def __init__(self, initial: float) -> None:
        self._sum, self._weight = initial * _INITIAL_SAMPLES, _INITIAL_SAMPLES

    @property
    def value(self) -> float:
        return self._sum / self._weight

    def add(self, sample: float) -> None:
        self._sum = self._sum * _FADE + sample
        self._weight = self._weight * _FADE + 1.0


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


@dataclass(slots=True)
class _Timed:
    request: ExpectedDecode
    starts_s: float
    ends_s: float
    weight: int
    joined: bool = False


class RequestForecast:
    """An end for each request, by the lengths of its tenant's answers."""

    def __init__(self, initial_token_s: float = 0.06, lengths: OutputLengths | None = None) -> None:
        if not initial_token_s > 0:
            raise ConfigError("the first guess of a time per token must be above 0", param="initial_token_s")
        self.lengths = lengths or OutputLengths()
        self._token_s = FadedMean(initial_token_s)
        self._open: dict[str, _Timed] = {}
        self._starts = TimeSums()
        self._ends = TimeSums()
        self._due: list[tuple[float, str]] = []  # heap of the next moment of each; some no longer count
        self._last_end_s = 0.0

    def expect(self, request: ExpectedDecode, now_s: float) -> None:
        self.end(request.request_id, now_s)
        weight = _ONE_SEQ + request.kv_tokens
        ends_s = request.prefill_ends_s + self._expected_s(request, 0.0)
        one = _Timed(request, request.prefill_ends_s, ends_s, weight)
        self._open[request.request_id] = one
        self._enter(one)

    def join(self, request_id: str, now_s: float) -> None:
        one = self._open.get(request_id)
        if one is not None and not one.joined:
            one.joined = True
            self._move(one, now_s, now_s + self._expected_s(one.request, 0.0))

    def end(self, request_id: str, now_s: float, output_tokens: int = 0) -> None:
        one = self._open.pop(request_id, None)
        if one is None:
            return
        self._leave(one)
        if one.joined and output_tokens:
            self._token_s.add((now_s - one.starts_s) / output_tokens)
            self.lengths.learn(one.request.tenant, output_tokens)

    def at(self, at_s: float, now_s: float) -> DecodeLoad:
        self._follow(now_s)
        return DecodeLoad(*divmod(self._starts.until(at_s) - self._ends.until(at_s), _ONE_SEQ))

    def over_by_s(self, now_s: float) -> float:
        self._follow(now_s)
        return max(now_s, self._last_end_s) + 1e-2

    def _expected_s(self, request: ExpectedDecode, decoded_s: float) -> float:
        """How long it decodes in all, given that it has decoded that long already."""
        token_s = self._token_s.value
        done = int(decoded_s / token_s)
        return self.lengths.expected(request.tenant, max(1, request.max_tokens), done) * token_s

    def _follow(self, now_s: float) -> None:
        """Gives a new moment to what should have started or ended by now. Waits grow by a quarter each time, so that
        a request comes up here a logarithmic number of times."""
        while self._due and tick_of(self._due[0][0]) <= tick_of(now_s):
            due_s, request_id = heappop(self._due)
            one = self._open.get(request_id)
            if one is None or _next_moment_s(one) != due_s:
                continue
            if one.joined:
                had_s = now_s - one.starts_s
                more_s = max(self._expected_s(one.request, had_s) - had_s, _LATE_SHARE * had_s, _MIN_LATE_S)
                self._move(one, one.starts_s, now_s + more_s)
            else:
                late_s = max(_LATE_SHARE * (now_s - one.request.prefill_ends_s), _MIN_LATE_S)
                self._move(one, now_s + late_s, now_s + late_s + one.ends_s - one.starts_s)

    def _move(self, one: _Timed, starts_s: float, ends_s: float) -> None:
        self._leave(one)
        one.starts_s, one.ends_s = starts_s, ends_s
        self._enter(one)

    def _enter(self, one: _Timed) -> None:
        self._starts.add(one.starts_s, one.weight)
        self._ends.add(one.ends_s, one.weight)
        self._last_end_s = max(self._last_end_s, one.ends_s)
        heappush(self._due, (_next_moment_s(one), one.request.request_id))
        if len(self._due) > 2 * len(self._open) + 64:
            self._due = [(_next_moment_s(each), request_id) for request_id, each in self._open.items()]
            heapify(self._due)

    def _leave(self, one: _Timed) -> None:
        self._starts.add(one.starts_s, -one.weight)
        self._ends.add(one.ends_s, -one.weight)


def _next_moment_s(one: _Timed) -> float:
    return one.ends_s if one.joined else one.starts_s
