"""The spans of a request: nested in time whatever the workers report, one pull per tier, and only what happened."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S

from moonpool.base.errors import ConfigError
from moonpool.frontend.trace_spans import AttemptTimes, PlannedSpan, attempt_span, request_spans
from moonpool.frontend.tracing import make_tracing
from moonpool.worker.messages import PrefillReply, TokenOut

seconds = st.floats(0, 1e4)


def reply(**changes: object) -> PrefillReply:
    usual: dict[str, object] = {
        "first": TokenOut(1), "finish_reason": None, "local_tokens": 64, "pool_tokens": 128, "pool_nbytes": 1,
        "queue_s": 0.1, "compute_s": 0.5, "pull_s": 0.2,
    }  # fmt: skip
    return PrefillReply(**{**usual, **changes})  # type: ignore[arg-type]


def attempt(answer: PrefillReply | None, **changes: object) -> AttemptTimes:
    usual: dict[str, object] = {
        "choice": 0, "number": 1, "began_s": 10.0, "routed_s": 10.5, "prefill_worker": "p", "decode_worker": "d",
        "replied_s": 12.0 if answer else None, "reply": answer, "handoff_s": 0.1, "num_tokens": 4, "ended_s": 13.0,
        "outcome": "done",
    }  # fmt: skip
    return AttemptTimes(**{**usual, **changes})  # type: ignore[arg-type]


def family(span: PlannedSpan) -> Iterator[tuple[PlannedSpan, PlannedSpan]]:
    for child in span.children:
        yield span, child
        yield from family(child)


def names(span: PlannedSpan) -> list[str]:
    return [child.name for _, child in family(span)]


def at(span: PlannedSpan, name: str) -> tuple[float, float]:
    (found,) = [child for _, child in family(span) if child.name == name]
    return found.begin_s, found.end_s


def test_a_request_from_conductor_to_decode() -> None:
    span = attempt_span(attempt(reply(ssd_tokens=64)))
    assert names(span) == ["route", "queue", "prefill", "pull dram", "pull ssd", "hand-off", "decode"]
    assert at(span, "route") == pytest.approx((10.0, 10.5))
    assert at(span, "queue") == pytest.approx((11.4, 11.5))
    assert at(span, "prefill") == pytest.approx((11.5, 12.0))
    assert at(span, "pull ssd") == pytest.approx((11.5, 11.7))
    assert at(span, "hand-off") == pytest.approx((12.0, 12.1))
    assert at(span, "decode") == pytest.approx((12.1, 13.0))


def test_what_was_pulled_while_the_prompt_waited_is_in_its_queue() -> None:
    span = attempt_span(attempt(reply(pull_s=0.0, remote_tokens=128)))
    (queue,) = [child for child in span.children if child.name == "queue"]
    assert [child.name for child in queue.children] == ["pull remote"]


@pytest.mark.parametrize(
    ("times", "expected", "is_error"),
    [
        (attempt(None, routed_s=None, num_tokens=0, outcome="overloaded"), ["route"], True),
        (attempt(None, num_tokens=0, outcome="peer_lost"), ["route"], True),
        (attempt(None, outcome="moved"), ["route", "decode"], False),
        (attempt(reply(finish_reason="stop", pool_tokens=0), handoff_s=None), ["route", "queue", "prefill"], False),
        (attempt(reply(pool_tokens=0), handoff_s=None), ["route", "queue", "prefill", "decode"], False),
        (attempt(None, routed_s=None, num_tokens=0, ended_s=None, outcome="cancelled"), ["route"], False),
    ],
)
def test_only_what_happened_has_a_span(times: AttemptTimes, expected: list[str], is_error: bool) -> None:
    span = attempt_span(times)
    assert names(span) == expected
    assert span.is_error is is_error


@given(st.lists(seconds, min_size=5, max_size=5), seconds, seconds, seconds, seconds)
def test_spans_are_nested_whatever_a_worker_says(
    times: list[float], queue_s: float, compute_s: float, pull_s: float, handoff_s: float
) -> None:
    began_s, routed_s, replied_s, ended_s, closed_s = sorted(times)
    answer = reply(queue_s=queue_s, compute_s=compute_s, pull_s=pull_s, ssd_tokens=64)
    noted = attempt(
        answer, handoff_s=handoff_s, began_s=began_s, routed_s=routed_s, replied_s=replied_s, ended_s=ended_s
    )
    root = PlannedSpan("root", began_s, closed_s, children=tuple(request_spans(began_s, began_s, [noted], closed_s)))
    for parent, child in family(root):
        assert parent.begin_s <= child.begin_s <= child.end_s <= parent.end_s, (parent.name, child.name)


def test_without_otlp_nothing_of_opentelemetry_is_imported() -> None:
    # FastAPI may import OpenTelemetry's API, which does nothing by itself.
    loaded = "[each for each in sys.modules if each.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]"
    code = f"import moonpool.frontend.service, sys; print({loaded})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://collector", ""])
def test_an_address_without_http_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp takes an address like http"):
        make_tracing(endpoint, "frontend")
