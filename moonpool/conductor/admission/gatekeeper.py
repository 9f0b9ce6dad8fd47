"""Admission with a memory: asks the forms, keeps the forecast informed, and measures how good the forecast was. Pure.

A request is told of at most four times: `sent`, `joined` when its prefill has ended, `ended`; calls about others are
ignored. Without a TBT target, or in a form that does not look ahead, the forecast is left alone.
"""

from __future__ import annotations

from collections.abc import Collection

from moonpool.conductor.admission.forecast import DecodeForecast, ExpectedDecode, RequestForecast
from moonpool.conductor.admission.forms import (
    Admission,
    AdmissionConfig,
    AdmissionForm,
    DecodeNow,
    PrefillNow,
    StepTime,
    Verdict,
)
from moonpool.conductor.costs.accuracy import ErrorWindow
from moonpool.conductor.messages import Candidate, Route


class Gatekeeper:
    """`errors`: sequences that were predicted to decode when a request's prefill ends, against those that did."""

    def __init__(self, config: AdmissionConfig, step_s: StepTime, forecast: DecodeForecast | None = None) -> None:
        self._forecast = forecast or RequestForecast()
        self._admission = Admission(config, step_s, self._forecast)
        self._looks_ahead = config.tbt_slo_s is not None and config.form is AdmissionForm.PREDICTED
        self._predicted: dict[str, int] = {}
        self.asks_before_decode = config.tbt_slo_s is not None
        self.errors = ErrorWindow("decode_load")

    def at_arrival(
        self, num_tokens: int, best: Candidate, before_s: float, decodes: Collection[DecodeNow], now_s: float
    ) -> Verdict:
        """`before_s`: time that it has waited, or will before it can be sent to that worker."""
        prefill = PrefillNow(before_s + best.queue_s, best.service_s)
        return self._admission.at_arrival(num_tokens, (prefill,), decodes, now_s)

    def before_decode(self, num_tokens: int, decode: DecodeNow, now_s: float) -> Verdict:
        return self._admission.before_decode(num_tokens, (decode,), now_s)

    def sent(self, call: Route, ttft_s: float, now_s: float) -> None:
        if not self._looks_ahead:
            return
        ends_s = now_s + ttft_s
        self._predicted[call.request_id] = self._forecast.at(ends_s, now_s).num_seqs
        self._forecast.expect(
            ExpectedDecode(call.request_id, ends_s, call.num_tokens, call.max_tokens, call.tenant), now_s
        )

    def joined(self, request_id: str, num_decoding: int, now_s: float) -> None:
        """Beside that many others."""
        predicted = self._predicted.pop(request_id, None)
        if predicted is not None:
            self.errors.add(predicted + 1, num_decoding + 1)
            self._forecast.join(request_id, now_s)

    def ended(self, request_id: str, now_s: float, output_tokens: int = 0) -> None:
        if self._looks_ahead:
            self._predicted.pop(request_id, None)
            self._forecast.end(request_id, now_s, output_tokens)
