"""Admission with state: decides by the chosen form, keeps the forecast up to date, and measures the predictions. Pure.

Each request is reported at most three times: `sent`, `joined` when its prefill has ended, `ended`; other request ids
are ignored. Those that other conductors have sent are reported as `other_came`, `other_joined` and `other_ended`.
Without a TBT target, or in a form that does not look ahead, the forecast is not used.

Predicted times to the end of a prefill are multiplied by `pace`, which is learnt: prompts that share a step, or that
find more blocks in the cache than the conductor knew, end sooner than the sum of their costs. A forecast for a moment
that is too late would leave out requests that still decode when the prefill really ends.
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
from moonpool.conductor.admission.request_forecast import OutputLengths, RequestForecast
from moonpool.conductor.costs import ErrorWindow
from moonpool.conductor.messages import Candidate, Route

_COVERED = 0.9  # share of outcomes that the safety margin covers
_MARGIN_STEP = 0.005
_MAX_MARGIN = 0.25
_MIN_PACE, _MAX_PACE = 0.25, 4.0
_CROWDED = 0.8  # load of a decode worker


class SafetyMargin:
    """A running 0.9 quantile of measured / predicted - 1: with `value` 0.03, nine of ten outcomes are at most 3 % above
    the prediction. Each outcome above the margin raises it by nine times as much as another outcome lowers it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def learn(self, predicted: float, actual: float) -> None:
        beyond = actual > predicted * (1 + self.value)
        moved = self.value + _MARGIN_STEP * (_COVERED if beyond else _COVERED - 1)
        self.value = min(_MAX_MARGIN, max(0.0, moved))


class _Sent(NamedTuple):
    at_s: float
    predicted_s: float  # until its prefill has ended, uncorrected
    num_seqs: float | None  # predicted to decode then; None: no forecast
    tbt_s: float | None  # predicted for then; None: no forecast


class AdmissionController:
    """`errors` compares the sequences predicted to decode at the end of a prefill with those that did."""

    def __init__(self, config: AdmissionConfig, step_s: StepTime, lengths: OutputLengths) -> None:
        is_paper = config.form is AdmissionForm.PAPER
        self._forecast: DecodeForecast = SystemForecast() if is_paper else RequestForecast(lengths)
        self._admission = Admission(config, step_s, self._forecast)
        forecasts = config.form in (AdmissionForm.PAPER, AdmissionForm.PREDICTED)
        self._looks_ahead = forecasts and config.tbt_slo_s is not None
        self._sent: dict[str, _Sent] = {}
        self._pace = FadedMean(1.0)  # measured over predicted seconds
        self._margin = SafetyMargin()  # for decode workers that are more crowded than predicted
        self._learns_margin = not is_paper  # the paper's rule takes the forecast as it is
        self._step_s = step_s
        self.asks_before_decode = config.tbt_slo_s is not None
        self.errors = ErrorWindow("decode_load")

    @property
    def pace(self) -> float:
        """Measured / predicted time to the end of a prefill, queue included."""
        return min(_MAX_PACE, max(_MIN_PACE, self._pace.value))

    def at_arrival(
        self, num_tokens: int, best: Candidate, before_s: float, decodes: Collection[DecodeNow], now_s: float
    ) -> Verdict:
        """`before_s`: how long the request has waited, or will wait before it can be sent to that worker."""
        pace = self.pace
        prefill = PrefillNow(
            queue_s=pace * best.queue_s,
            work_s=pace * best.service_s,
            before_s=before_s,
            pages_s=pace * best.pages_s,
            pull_s=pace * (best.transfer_s - best.overlap_s),
        )
        return self._admission.at_arrival(num_tokens, (prefill,), decodes, now_s, self._margin.value)

    def before_decode(self, request_id: str, num_tokens: int, decode: DecodeNow, now_s: float) -> Verdict:
        verdict = self._admission.before_decode(num_tokens, (decode,), now_s)
        sent = self._sent.get(request_id)
        # The error of a forecast for a worker with much room says nothing about the error at the limit.
        if self._learns_margin and sent is not None and sent.tbt_s is not None and verdict.load > _CROWDED:
            alone_s = self._step_s(1, num_tokens)
            actual_s = self._step_s(decode.num_seqs + 1, decode.kv_tokens + num_tokens)
            self._margin.learn(sent.tbt_s - alone_s, actual_s - alone_s)
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
        """The request begins to decode beside `num_decoding` others."""
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        self._pace.add(now_s - sent.at_s, sent.predicted_s)
        if sent.num_seqs is not None:
            self.errors.add(sent.num_seqs + 1, num_decoding + 1)
            self._forecast.join(request_id, now_s)

    def other_came(self, request: ExpectedDecode, now_s: float) -> None:
        """Another conductor has sent a request, or its prefill ends at another time than expected. Its predicted time
        until then is multiplied by the pace."""
        if self._looks_ahead:
            ends_s = now_s + self.pace * (request.prefill_ends_s - now_s)
            self._forecast.expect(request._replace(prefill_ends_s=ends_s), now_s)

    def other_joined(self, request_id: str, now_s: float) -> None:
        if self._looks_ahead:
            self._forecast.join(request_id, now_s)

    def other_ended(self, request_id: str, now_s: float) -> None:
        if self._looks_ahead:
            self._forecast.end(request_id, now_s)

    def ended(self, request_id: str, now_s: float, output_tokens: int = 0) -> None:
        self._sent.pop(request_id, None)
        if self._looks_ahead:
            self._forecast.end(request_id, now_s, output_tokens)
