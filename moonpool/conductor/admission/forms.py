"""Decides whether a request is admitted, and if not, why and when to try again (the paper's early rejection). Pure.

The load of a worker is a predicted time divided by its target: the time to first token of a request that joins the
worker's queue now / the TTFT target, or the time between tokens with the request in the worker's batch / the TBT
target. The load of the prefill pool is that of the worker that the request would go to; the load of the decode pool is,
as in the paper, the mean over its workers. A load above 1 refuses the request.

| form | at arrival | before decoding |
|---|---|---|
| `none` | prefill load | decode load now: a refusal here has wasted a prefill |
| `early` | prefill load, decode load now | the same |
| `paper` | prefill load, decode load forecast for the end of this request's prefill by the paper's rule | the same |
| `predicted` | prefill load, decode load forecast for the end of this request's prefill by our own rule | the same |

`early` sees a decode load that lags behind by one prefill, so it admits too many requests and then too few. The paper's
rule gives every request the same decode time (SystemForecast). Our own rule weighs each request by the probability that
its answer still goes on (RequestForecast), and adds a safety margin for forecasts that were too low (controller.py):
without a margin every second request at the limit would be refused after its prefill. Early refusals save prefill
work. They lead to fewer refusals where prefill workers are short as well, because a wasted prefill takes the time of a
request that could have been decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from moonpool.base.errors import ConfigError, Overloaded
from moonpool.conductor.admission.forecast import DecodeForecast

MIN_RETRY_S = 1.0  # the shortest Retry-After
_TBT_AIM = 0.9  # share of the target that a batch is filled to (of 1, 0.95 and 0.9 this served most; docs/conductor.md)
_RETRY_STEPS = 7  # bisection steps in the search for the moment at which the load falls

StepTime: TypeAlias = Callable[[float, float], float]  # (sequences, tokens of KV) of one worker's batch -> seconds


class AdmissionForm(StrEnum):
    NONE = "none"
    EARLY = "early"
    PAPER = "paper"
    PREDICTED = "predicted"


class Cause(StrEnum):
    """Why a request was refused: a label of metrics."""

    TTFT = "ttft"
    PAGES = "pages"  # the decode worker would have pages too late for the TTFT target
    TBT = "tbt"
    TOO_LONG = "too_long"  # the request would miss a target on idle workers
    QUEUE_FULL = "queue_full"
    GAVE_WAY = "gave_way"
    TOO_LATE = "too_late"  # the request waited until its target could not be met

    @property
    def is_of_decode(self) -> bool:
        """Whether decode workers were short."""
        return self in (Cause.TBT, Cause.PAGES)


@dataclass(frozen=True, slots=True)
class AdmissionConfig:
    """Targets are in seconds; None refuses nothing."""

    form: AdmissionForm = AdmissionForm.PREDICTED
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_slo_s", "tbt_slo_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0", param=name)

    @property
    def has_target(self) -> bool:
        return self.ttft_slo_s is not None or self.tbt_slo_s is not None


class TtftPart(NamedTuple):
    """A part of a predicted time to first token. `cause` is that of a refusal for which it is the largest part."""

    seconds: float
    text: str
    cause: Cause = Cause.TTFT

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s {self.text}"


class PrefillNow(NamedTuple):
    """A prefill worker: the predicted work ahead of this request, and the request's own work there.

    `before_s` is how long the request waits elsewhere, or has waited: it counts for the time to first token, not for
    the moment at which the prefill ends if the request is sent now. While the request waits in the queue, the decode
    worker frees pages for it, which takes `pages_s`. `pull_s` is a part of `work_s`.
    """

    queue_s: float
    work_s: float
    before_s: float = 0.0
    pages_s: float = 0.0
    pull_s: float = 0.0

    @property
    def ends_after_s(self) -> float:
        """How long the request takes to the end of its prefill if it is sent now."""
        return max(self.queue_s, self.pages_s) + self.work_s

    @property
    def ttft_s(self) -> float:
        return self.before_s + self.ends_after_s

    @property
    def largest_wait(self) -> TtftPart:
        others = TtftPart(self.before_s + self.queue_s, "of other prompts come first")
        if self.pages_s <= self.queue_s:
            return others
        pages = TtftPart(self.pages_s, "until its decode worker has pages for it", Cause.PAGES)
        return max(pages, others._replace(seconds=self.before_s))

    @property
    def largest_work(self) -> TtftPart:
        return max(
            TtftPart(self.work_s - self.pull_s, "to compute the prompt"),
            TtftPart(self.pull_s, "to pull its blocks from the pool"),
        )


class DecodeNow(NamedTuple):
    """A decode worker's batch now."""

    num_seqs: int
    kv_tokens: int


class AdmittedRequest(NamedTuple):
    """`prefill_ends_s` is when decoding is expected to begin; `tbt_s` is the time between tokens predicted for then,
    None in forms that do not look ahead."""

    load: float
    prefill_ends_s: float
    tbt_s: float | None = None


class RefusedRequest(NamedTuple):
    """`reason` is a sentence for the user. `retry_after_s` is None if waiting does not help: the request is too
    large."""

    reason: str
    retry_after_s: float | None
    load: float
    cause: Cause

    def error(self) -> Overloaded:
        return Overloaded(self.reason, retry_after_s=self.retry_after_s or MIN_RETRY_S)


Verdict: TypeAlias = AdmittedRequest | RefusedRequest


class Admission:
    """Decides and keeps no state. The caller reports admitted requests to the forecast."""

    def __init__(self, config: AdmissionConfig, step_s: StepTime, forecast: DecodeForecast) -> None:
        self._config = config
        self._step_s = step_s
        self._forecast = forecast

    def at_arrival(
        self,
        num_tokens: int,
        prefills: Collection[PrefillNow],
        decodes: Collection[DecodeNow],
        now_s: float,
        margin: float = 0.0,
    ) -> Verdict:
        """Decide when a request arrives. Both pools must have a worker. The caller may pass only the workers chosen for
        this request, except that `paper` and `predicted` divide the forecast by the number of decode workers. `margin`
        is the relative safety margin of the forecast."""
        prefill = min(prefills, key=lambda one: one.ttft_s)
        prefill_ends_s = now_s + prefill.ends_after_s
        verdict = self._check_prefill(prefill, prefill_ends_s)
        if isinstance(verdict, RefusedRequest) or self._config.form is AdmissionForm.NONE:
            return verdict
        if self._config.form is AdmissionForm.EARLY:
            decode = self._check_decode_now(num_tokens, decodes, now_s)
        else:
            decode = self._check_decode_then(num_tokens, len(decodes), prefill_ends_s, now_s, margin)
        if isinstance(decode, RefusedRequest):
            return decode
        return AdmittedRequest(max(verdict.load, decode.load), prefill_ends_s, decode.tbt_s)

    def before_decode(self, num_tokens: int, decodes: Collection[DecodeNow], now_s: float) -> Verdict:
        """Decide again when the prefill has ended; the same in all forms."""
        return self._check_decode_now(num_tokens, decodes, now_s)

    # prefill

    def _check_prefill(self, best: PrefillNow, prefill_ends_s: float) -> Verdict:
        target_s = self._config.ttft_slo_s
        ttft_s = best.ttft_s
        load = 0.0 if target_s is None else ttft_s / target_s
        if target_s is None or load <= 1:
            return AdmittedRequest(load, prefill_ends_s)
        if best.work_s > target_s:
            reason = (
                f"this prompt alone takes {best.work_s:.2f} s until its first token ({best.largest_work}), "
                f"the target is {target_s:g} s; a shorter prompt may pass"
            )
            return RefusedRequest(reason, None, load, Cause.TOO_LONG)
        largest = max(best.largest_wait, best.largest_work)
        reason = f"the first token would take {ttft_s:.2f} s, the target is {target_s:g} s: {largest}"
        return RefusedRequest(reason, max(MIN_RETRY_S, ttft_s - target_s), load, largest.cause)

    # decode

    def _check_decode_now(self, num_tokens: int, decodes: Collection[DecodeNow], now_s: float) -> Verdict:
        aim_s = self._aim_s(num_tokens)
        if aim_s is None:
            return AdmittedRequest(0.0, now_s)
        tbt_s = sum(self._step_s(one.num_seqs + 1, one.kv_tokens + num_tokens) for one in decodes) / len(decodes)
        if tbt_s <= aim_s:
            return AdmittedRequest(tbt_s / aim_s, now_s)
        return self._refuse_decode("", tbt_s, aim_s, num_tokens, len(decodes), now_s, now_s)

    def _check_decode_then(
        self, num_tokens: int, num_workers: int, at_s: float, now_s: float, margin: float
    ) -> Verdict:
        aim_s = self._aim_s(num_tokens)
        if aim_s is None:
            return AdmittedRequest(0.0, at_s)
        predicted_s = self._predicted_tbt_s(num_tokens, num_workers, at_s, now_s)
        # The request's own share is certain, so the margin applies to the rest of the batch only.
        tbt_s = predicted_s + margin * (predicted_s - self._step_s(1, num_tokens))
        if tbt_s <= aim_s:
            return AdmittedRequest(tbt_s / aim_s, at_s, predicted_s)
        when = f"in {at_s - now_s:.2f} s, when its prompt would be done, "
        return self._refuse_decode(when, tbt_s, aim_s, num_tokens, num_workers, at_s, now_s)

    def _aim_s(self, num_tokens: int) -> float | None:
        """Return the longest step that a batch may have with this request in it: less than the target, because batches
        grow while they decode, and half of the requests would miss the target by a few percent. A long prompt that
        meets the target only alone in its batch may use all of it."""
        target_s = self._config.tbt_slo_s
        return None if target_s is None else max(_TBT_AIM * target_s, min(target_s, self._step_s(1, num_tokens)))

    def _predicted_tbt_s(self, num_tokens: int, num_workers: int, at_s: float, now_s: float) -> float:
        """Return the TBT with this request in the batch, if the forecast load is spread evenly over the workers."""
        load = self._forecast.at(at_s, now_s)
        return self._step_s(load.num_seqs / num_workers + 1, load.kv_tokens / num_workers + num_tokens)

    def _refuse_decode(
        self, when: str, tbt_s: float, aim_s: float, num_tokens: int, num_workers: int, at_s: float, now_s: float
    ) -> RefusedRequest:
        load, target_s = tbt_s / aim_s, self._config.tbt_slo_s or aim_s
        alone_s = self._step_s(1, num_tokens)
        if alone_s > target_s:
            reason = (
                f"tokens of this prompt alone come {alone_s * 1e3:.0f} ms apart, the target is {target_s * 1e3:g} ms"
            )
            return RefusedRequest(f"{reason}; a shorter prompt may pass", None, load, Cause.TOO_LONG)
        reason = f"{when}tokens would come {tbt_s * 1e3:.0f} ms apart, the target is {target_s * 1e3:g} ms"
        if tbt_s <= target_s:
            reason += f" and {aim_s * 1e3:.3g} ms are given away"
        falls_s = self._falls_s(num_tokens, num_workers, at_s, now_s, aim_s)
        retry_after_s = max(MIN_RETRY_S, falls_s - at_s)
        return RefusedRequest(f"{reason}: too many answers are being written", retry_after_s, load, Cause.TBT)

    def _falls_s(self, num_tokens: int, num_workers: int, at_s: float, now_s: float, aim_s: float) -> float:
        """Return a moment after `at_s` from which the load is predicted to be below 1 if no other request is
        admitted."""
        early_s, late_s = at_s, max(at_s, self._forecast.over_by_s(now_s))
        for _ in range(_RETRY_STEPS):
            middle_s = (early_s + late_s) / 2
            if self._predicted_tbt_s(num_tokens, num_workers, middle_s, now_s) > aim_s:
                early_s = middle_s
            else:
                late_s = middle_s
        return late_s
