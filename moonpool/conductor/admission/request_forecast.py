"""The forecast that the conductor asks: each request counts by how likely its answer still goes on then. Pure.

How likely follows from the lengths of answers before, those of its tenant up to its own max_tokens, and from the
measured time per token. One end for each, at the mean length, would forget the long answers, and they are most of what
is there at any moment: half of the tokens are in the longest quarter of the answers.

Requests whose expected length is alike to a factor of two share one class (length_class.py), whoever sent them. So an
answer here costs the same, a few products of arrays, with a hundred open requests and with a hundred thousand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moonpool.base.errors import ConfigError
from moonpool.conductor.admission.forecast import DecodeLoad, ExpectedDecode, FadedMean
from moonpool.conductor.admission.length_class import NUM_STEPS, STEP_S, LengthClass, step_of
from moonpool.conductor.admission.output_lengths import OutputLengths

_USUAL_TOKENS = 200.0  # of an answer: how much the first guess of a time per token weighs
_OVER_AFTER = 4.0  # times the mean length: few answers are longer


@dataclass(slots=True)
class _Open:
    request: ExpectedDecode
    group: LengthClass
    starts: int  # the step at which it does, or did
    starts_s: float
    joined: bool = False


class RequestForecast:
    """See DecodeForecast. Moments are told apart to a quarter of a second."""

    def __init__(self, initial_token_s: float = 0.06, lengths: OutputLengths | None = None) -> None:
        if not initial_token_s > 0:
            raise ConfigError("the first guess of a time per token must be above 0", param="initial_token_s")
        self.lengths = lengths or OutputLengths()
        self._token_s = FadedMean(initial_token_s, _USUAL_TOKENS)
        self._open: dict[str, _Open] = {}
        self._groups: dict[int, LengthClass] = {}  # by the logarithm of the expected length
        self._now = 0  # the step up to which all groups have come
        self._over_by_s = 0.0

    def expect(self, request: ExpectedDecode, now_s: float) -> None:
        self.end(request.request_id, now_s)
        mean_tokens = self.lengths.expected(request.tenant, max(1, request.max_tokens))
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
            self.lengths.learn(one.request.tenant, output_tokens)
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
