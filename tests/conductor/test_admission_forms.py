"""The forms of admission: what each looks at, what it says, and when to come back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import ConfigError
from moonpool.conductor.admission.controller import AdmissionController
from moonpool.conductor.admission.forecast import ExpectedDecode, SystemForecast, tick_of
from moonpool.conductor.admission.forms import (
    Admission,
    AdmissionConfig,
    AdmissionForm,
    AdmittedRequest,
    Cause,
    DecodeNow,
    PrefillNow,
    RefusedRequest,
)
from moonpool.conductor.admission.request_forecast import OutputLengths
from moonpool.conductor.messages import Candidate, Route

IDLE = [PrefillNow(0.0, 1.0)]
FULL = [DecodeNow(10, 0)] * 2
EMPTY = [DecodeNow(0, 0)] * 2


def step_s(num_seqs: float, kv_tokens: float) -> float:
    return 0.01 * num_seqs + 1e-6 * kv_tokens  # ten sequences are all that 0.1 s allow


def admission(form: str, forecast: SystemForecast | None = None) -> Admission:
    config = AdmissionConfig(AdmissionForm(form), ttft_slo_s=5.0, tbt_slo_s=0.1)
    return Admission(config, step_s, forecast or SystemForecast(8.0))


def forecast_of(joined: int, coming_s: tuple[float, ...] = ()) -> SystemForecast:
    forecast = SystemForecast(8.0)
    for number in range(joined):
        forecast.expect(ExpectedDecode(f"j{number}", 0.0, 0), 0.0)
        forecast.join(f"j{number}", 0.0)
    for number, at_s in enumerate(coming_s):
        forecast.expect(ExpectedDecode(f"c{number}", at_s, 0), 0.0)
    return forecast


def candidate(prefill_s: float) -> Candidate:
    return Candidate(worker="p", local_blocks=0, pulled_blocks=0, transfer_s=0.0, queue_s=0.0, prefill_s=prefill_s)


def test_none_sees_a_full_decode_pool_only_after_the_prefill() -> None:
    one = admission("none")
    assert one.at_arrival(100, IDLE, FULL, 0.0) == AdmittedRequest(0.2, 1.0)
    refused = one.before_decode(100, FULL, 1.0)
    assert isinstance(refused, RefusedRequest)
    assert refused.load == pytest.approx(1.101 / 0.9)
    assert refused.reason == (
        "tokens would come 110 ms apart, the target is 100 ms: too many answers are being written"
    )


def test_a_tenth_of_the_target_is_kept_free_for_what_batches_grow_by() -> None:
    one = admission("early")
    assert isinstance(one.at_arrival(100, IDLE, [DecodeNow(7, 0)], 0.0), AdmittedRequest)
    refused = one.at_arrival(5000, IDLE, [DecodeNow(8, 0)], 0.0)
    assert isinstance(refused, RefusedRequest)
    assert "95 ms apart, the target is 100 ms and 90 ms are given away: too many" in refused.reason
    assert isinstance(one.at_arrival(85_000, IDLE, EMPTY, 0.0), AdmittedRequest), "alone it has the whole target"


def test_early_sees_the_decode_pool_as_it_is_now() -> None:
    assert isinstance(admission("early").at_arrival(100, IDLE, FULL, 0.0), RefusedRequest)
    verdict = admission("early", forecast_of(0, (0.5,) * 30)).at_arrival(100, IDLE, EMPTY, 0.0)
    assert isinstance(verdict, AdmittedRequest)  # although thirty are on their way


def test_predicted_sees_who_comes_and_who_goes() -> None:
    refused = admission("predicted", forecast_of(0, (0.5,) * 30)).at_arrival(100, IDLE, EMPTY, 0.0)
    assert isinstance(refused, RefusedRequest)
    assert refused.reason.startswith("in 1.00 s, when its prompt would be done, tokens would come 160 ms apart")
    leaving = admission("predicted", forecast_of(20)).at_arrival(100, [PrefillNow(3.0, 1.0)], FULL, 7.0)
    assert isinstance(leaving, AdmittedRequest)  # all of them will have decoded for 8 s by then
    assert leaving.prefill_ends_s == 11.0


DECODE_S = 20.0  # the decode time that the paper's rule gives every request until others are measured
ARRIVALS = st.lists(st.tuples(st.floats(0, 5), st.floats(0, 30), st.integers(1, 9000), st.booleans()), max_size=60)


@given(ARRIVALS, st.integers(1, 4), st.floats(0, 4.9))
def test_paper_counts_who_has_joined_by_then_and_leaves_out_who_has_decoded_for_the_one_decode_time(
    arrivals: list[tuple[float, float, int, bool]], num_workers: int, own_s: float
) -> None:
    """The paper's rule, request by request: at the end of this prefill, those whose prefill ends by then decode, those
    that have decoded for t_d or longer do not; the load is the mean TBT over the decode workers / the target."""
    gate = AdmissionController(AdmissionConfig(AdmissionForm.PAPER, 5.0, 0.1), step_s, OutputLengths())
    now_s, starts = 0.0, []
    for number, (passed_s, ttft_s, num_tokens, joins) in enumerate(arrivals):
        now_s += passed_s
        call = Route(request_id=f"r{number}", keys=[], num_tokens=num_tokens, max_tokens=9)
        gate.sent(call, 0.0 if joins else ttft_s, AdmittedRequest(0.5, now_s), now_s)
        if joins:
            gate.joined(call.request_id, 0, now_s)
        starts.append((now_s if joins else now_s + ttft_s, num_tokens, joins))
    then_s = now_s + own_s

    def decodes(start_s: float, joined: bool) -> bool:
        over_s = then_s - DECODE_S
        late = not joined and over_s < now_s  # a prefill that is late ends now at the earliest
        return tick_of(start_s) <= tick_of(then_s) and (late or tick_of(start_s) > tick_of(over_s))

    there = [num_tokens for start_s, num_tokens, joined in starts if decodes(start_s, joined)]
    tbt_s = step_s(len(there) / num_workers + 1, sum(there) / num_workers + 100)
    verdict = gate.at_arrival(100, candidate(own_s), 0.0, [DecodeNow(99, 0)] * num_workers, now_s)
    assert verdict.load == pytest.approx(max(own_s / 5.0, tbt_s / 0.09))
    assert isinstance(verdict, RefusedRequest) == (verdict.load > 1)


def load_after(form: AdmissionForm, num_crowded: int) -> float:
    """The load with four sequences decoding, after so many requests found a worker more crowded than predicted."""
    gate = AdmissionController(AdmissionConfig(form, 5.0, 0.1), step_s, OutputLengths())
    calls = [Route(request_id=f"r{number}", keys=[], num_tokens=1, max_tokens=9) for number in range(num_crowded + 4)]
    for call in calls[4:]:
        gate.sent(call, 1.0, AdmittedRequest(0.5, 1.0, tbt_s=0.05), 0.0)
        gate.before_decode(call.request_id, 100, DecodeNow(9, 0), 0.5)
        gate.ended(call.request_id, 0.5)
    for call in calls[:4]:
        gate.sent(call, 0.0, AdmittedRequest(0.5, 1.0), 1.0)
        gate.joined(call.request_id, 0, 1.0)
    return gate.at_arrival(100, candidate(0.1), 0.0, EMPTY[:1], 1.0).load


def test_paper_takes_its_forecast_as_it_is_where_predicted_learns_a_margin() -> None:
    assert load_after(AdmissionForm.PAPER, 20) == load_after(AdmissionForm.PAPER, 0)
    assert load_after(AdmissionForm.PAPER, 0) == pytest.approx(step_s(5, 104) / 0.09)
    assert load_after(AdmissionForm.PREDICTED, 20) > load_after(AdmissionForm.PREDICTED, 0)


def test_retry_after_is_when_the_load_is_predicted_to_fall() -> None:
    refused = admission("early", forecast_of(20)).at_arrival(100, IDLE, FULL, 2.0)
    assert isinstance(refused, RefusedRequest)
    assert refused.retry_after_s == pytest.approx(6.0, abs=0.1)  # they joined at 0 and decode for 8 s
    queued = admission("early").at_arrival(100, [PrefillNow(7.5, 1.0)], EMPTY, 0.0)
    assert isinstance(queued, RefusedRequest)
    assert queued.retry_after_s == pytest.approx(3.5)
    assert queued.reason == ("the first token would take 8.50 s, the target is 5 s: 7.50 s of other prompts come first")
    assert queued.error().retry_after_s == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("prefill", "part", "cause"),
    [
        (PrefillNow(6.0, 1.0, pages_s=5.9), "6.00 s of other prompts come first", Cause.TTFT),
        (PrefillNow(2.0, 1.0, 4.5, pages_s=1.0), "6.50 s of other prompts come first", Cause.TTFT),
        (PrefillNow(1.0, 3.0, 2.5), "3.50 s of other prompts come first", Cause.TTFT),
        (PrefillNow(6.0, 1.0, pages_s=6.1), "6.10 s until its decode worker has pages for it", Cause.PAGES),
        (PrefillNow(1.0, 1.0, 3.5, pages_s=2.0), "3.50 s of other prompts come first", Cause.TTFT),
        (PrefillNow(1.5, 4.0), "4.00 s to compute the prompt", Cause.TTFT),
        (PrefillNow(1.5, 4.0, pull_s=2.5), "2.50 s to pull its blocks from the pool", Cause.TTFT),
        (PrefillNow(1.5, 4.0, pull_s=1.0), "3.00 s to compute the prompt", Cause.TTFT),
    ],
)
def test_a_refusal_names_the_largest_part_of_the_time(prefill: PrefillNow, part: str, cause: Cause) -> None:
    refused = admission("early").at_arrival(100, [prefill], EMPTY, 0.0)
    assert isinstance(refused, RefusedRequest)
    assert refused.reason == f"the first token would take {prefill.ttft_s:.2f} s, the target is 5 s: {part}"
    assert refused.cause is cause


def test_a_request_that_never_fits_is_told_so() -> None:
    long = admission("predicted").at_arrival(100, [PrefillNow(0.0, 6.0, pull_s=4.0)], EMPTY, 0.0)
    assert isinstance(long, RefusedRequest)
    assert long.retry_after_s is None
    assert long.reason == (
        "this prompt alone takes 6.00 s until its first token (4.00 s to pull its blocks from the pool), "
        "the target is 5 s; a shorter prompt may pass"
    )
    wide = admission("predicted").at_arrival(95_000, IDLE, EMPTY, 0.0)
    assert isinstance(wide, RefusedRequest)
    assert wide.retry_after_s is None
    assert wide.reason == (
        "tokens of this prompt alone come 105 ms apart, the target is 100 ms; a shorter prompt may pass"
    )
    assert wide.error().retry_after_s >= 1


def test_without_targets_everything_is_let_in() -> None:
    for form in AdmissionForm:
        one = Admission(AdmissionConfig(form), step_s, forecast_of(99))
        assert isinstance(one.at_arrival(10**6, [PrefillNow(99.0, 99.0)], FULL, 1.0), AdmittedRequest)
        assert isinstance(one.before_decode(10**6, FULL, 1.0), AdmittedRequest)
    wrong: list[dict[str, Any]] = [{"ttft_slo_s": 0.0}, {"tbt_slo_s": float("nan")}]
    for settings in wrong:
        with pytest.raises(ConfigError):
            AdmissionConfig(**settings)


@given(
    st.sampled_from(list(AdmissionForm)),
    st.lists(st.tuples(st.floats(0, 9), st.floats(0.01, 9), st.just(0.0), st.floats(0, 9)), min_size=1).map(
        lambda each: [PrefillNow(*one) for one in each]
    ),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 90_000)).map(lambda one: DecodeNow(*one)), min_size=1),
    st.integers(1, 90_000),
    st.integers(0, 60),
)
def test_load_above_one_and_refusal_are_the_same_thing(
    form: AdmissionForm, prefills: list[PrefillNow], decodes: list[DecodeNow], num_tokens: int, joined: int
) -> None:
    forecast = forecast_of(joined)
    one = Admission(AdmissionConfig(form, 5.0, 0.1), step_s, forecast)
    verdict = one.at_arrival(num_tokens, prefills, decodes, 1.0)
    assert (verdict.load > 1) == isinstance(verdict, RefusedRequest)
    if isinstance(verdict, RefusedRequest):
        assert verdict.reason
        assert verdict.retry_after_s is None or 1 <= verdict.retry_after_s <= 20
    else:
        ttft_s = min(max(view.queue_s, view.pages_s) + view.work_s for view in prefills)
        assert verdict.prefill_ends_s == pytest.approx(1.0 + ttft_s)
