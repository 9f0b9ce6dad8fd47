"""Admission with a memory: asks the forms, keeps the forecast informed, and measures how good predictions were. Pure.

A request is told of at most three times: `sent`, `joined` when its prefill has ended, `ended`; calls about others are
ignored. Without a TBT target, or in a form that does not look ahead, the forecast is left alone.

Predicted times to the end of a prefill are corrected by how earlier ones came out: prompts that share a step, or that
find more in the cache than was known, are done sooner than the sum of their costs, and a forecast for a moment that
is too late finds those gone who will still be there.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from moonpool.conductor.admission.forecast import DecodeForecast, ExpectedDecode, FadedMean, SystemForecast
from moonpool.conductor.admission.forms import (
    Admission,
    AdmissionConfig,
    AdmissionForm,
    AdmittedRequest,
    DecodeNow,
    PrefillNow,
    StepTime,
    Verdict,
)
from moonpool.conductor.admission.request_forecast import RequestForecast
from moonpool.conductor.admission.safety_margin import SafetyMargin
from moonpool.conductor.costs.accuracy import ErrorWindow
from moonpool.conductor.messages import Candidate, Route

_LOWEST_PACE, _HIGHEST_PACE = 0.25, 4.0
_CROWDED = 0.8  # load of a decode worker


class _Sent(NamedTuple):
    at_s: float
    predicted_s: float  # until its prefill has ended, uncorrected
    num_seqs: float | None  # predicted to decode then; None: nobody asked
    tbt_s: float | None  # predicted for then; the same


class AdmissionController:
    """`errors`: sequences that were predicted to decode when a request's prefill ends, against those that did."""

    def __init__(self, config: AdmissionConfig, step_s: StepTime) -> None:
        is_paper = config.form is AdmissionForm.PAPER
        self._forecast: DecodeForecast = SystemForecast() if is_paper else RequestForecast()
        self._admission = Admission(config, step_s, self._forecast)
        forecasts = config.form in (AdmissionForm.PAPER, AdmissionForm.PREDICTED)
        self._looks_ahead = forecasts and config.tbt_slo_s is not None
        self._sent: dict[str, _Sent] = {}
        self._pace = FadedMean(1.0)  # measured over predicted seconds
        self._caution = SafetyMargin()  # decode workers that were more crowded than predicted
        self._has_margin = not is_paper  # the paper's rule takes the forecast as it is
        self._step_s = step_s
        self.asks_before_decode = config.tbt_slo_s is not None
        self.errors = ErrorWindow("decode_load")

    @property
    def pace(self) -> float:
        """How long prefills take, queue included, over what is predicted."""
        return min(_HIGHEST_PACE, max(_LOWEST_PACE, self._pace.value))

    def at_arrival(
        self, num_tokens: int, best: Candidate, before_s: float, decodes: Collection[DecodeNow], now_s: float
    ) -> Verdict:
        """`before_s`: time that it has waited, or will before it can be sent to that worker."""
        pace = self.pace
        prefill = PrefillNow(pace * best.queue_s, pace * best.service_s, before_s)
        return self._admission.at_arrival(num_tokens, (prefill,), decodes, now_s, self._caution.value)

    def before_decode(self, request_id: str, num_tokens: int, decode: DecodeNow, now_s: float) -> Verdict:
        verdict = self._admission.before_decode(num_tokens, (decode,), now_s)
        sent = self._sent.get(request_id)
        # How far it is off where there is room for many more says nothing of how far it is off where it matters.
        if self._has_margin and sent is not None and sent.tbt_s is not None and verdict.load > _CROWDED:
            alone_s = self._step_s(1, num_tokens)
            actual_s = self._step_s(decode.num_seqs + 1, decode.kv_tokens + num_tokens)
            self._caution.learn(sent.tbt_s - alone_s, actual_s - alone_s)
        return verdict

    def sent(self, call: Route, ttft_s: float, verdict: Verdict, now_s: float) -> None:
        num_seqs = None
        tbt_s = verdict.tbt_s if isinstance(verdict, AdmittedRequest) else None
        if self._looks_ahead:
            ends_s = now_s + self.pace * ttft_s
            num_seqs = self._forecast.at(ends_s, now_s).num_seqs
            self._forecast.expect(
                ExpectedDecode(call.request_id, ends_s, call.num_tokens, call.max_tokens, call.tenant), now_s
            )
        self._sent[call.request_id] = _Sent(now_s, ttft_s, num_seqs, tbt_s)

    def joined(self, request_id: str, num_decoding: int, now_s: float) -> None:
        """Beside that many others."""
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        self._pace.add(now_s - sent.at_s, sent.predicted_s)
        if sent.num_seqs is not None:
            self.errors.add(sent.num_seqs + 1, num_decoding + 1)
            self._forecast.join(request_id, now_s)

    def ended(self, request_id: str, now_s: float, output_tokens: int = 0) -> None:
        self._sent.pop(request_id, None)
        if self._looks_ahead:
            self._forecast.end(request_id, now_s, output_tokens)
