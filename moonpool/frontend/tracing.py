"""OpenTelemetry traces of requests, with `--otlp`: one trace per request, sent by OTLP over HTTP from a thread.

The front end notes when things happen to a request (ChoiceTrace), and makes all spans when the request has ended
(trace_spans.py). A W3C `traceparent` of the client becomes the parent, and its sampling decision counts; the answer's
`traceparent` header names the request's span. Only make_tracing() imports OpenTelemetry; without `--otlp` nothing here
runs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Scope, Send

import moonpool
from moonpool.base.errors import ConfigError
from moonpool.conductor.messages import Decision
from moonpool.frontend.attempt import TokenBatch
from moonpool.frontend.trace_spans import AttemptTimes, PlannedSpan, request_spans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

_EXPORT_S = 3.0  # to one attempt of the collector to take spans
_CLOSE_S = 1.5  # for the last spans
_TRACES_PATH = "/v1/traces"
_HEADERS = ("traceparent", "tracestate")


class ChoiceTrace:
    """Notes the attempts of one choice."""

    def __init__(self, choice: int, attempts: list[AttemptTimes]) -> None:
        self._choice = choice
        self._all = attempts
        self._number = 0
        self._now: AttemptTimes | None = None

    def began(self) -> None:
        self._number += 1
        self._now = AttemptTimes(self._choice, self._number, time.monotonic())
        self._all.append(self._now)

    def routed(self, decision: Decision) -> None:
        assert self._now is not None
        self._now.routed_s = time.monotonic()
        self._now.prefill_worker, self._now.decode_worker = decision.prefill.name, decision.decode.name

    def accepted(self, batch: TokenBatch) -> None:
        assert self._now is not None
        self._now.num_tokens += len(batch.tokens)
        if batch.prefill is not None:
            self._now.replied_s, self._now.reply = time.monotonic(), batch.prefill

    def ended(self, outcome: str, handoff_s: float | None) -> None:
        """End the attempt that is under way, if one is."""
        if self._now is not None and self._now.ended_s is None:
            self._now.ended_s, self._now.outcome, self._now.handoff_s = time.monotonic(), outcome, handoff_s


class RequestTrace:
    """Notes one request, from its arrival. `span` is its own span."""

    def __init__(self, span: Span, began_s: float) -> None:
        self.span = span
        self.began_s = began_s
        self._prepared_s: float | None = None
        self._attempts: list[AttemptTimes] = []

    def prepared(self) -> None:
        self._prepared_s = time.monotonic()

    def choice(self, index: int) -> ChoiceTrace | None:
        """Return where to note a choice; None if the client wants no trace of this request."""
        return ChoiceTrace(index, self._attempts) if self.span.is_recording() else None

    def planned(self, ended_s: float) -> list[PlannedSpan]:
        return request_spans(self.began_s, self._prepared_s, self._attempts, ended_s)


class Tracing:
    """Makes the spans; `await close()` sends the last ones. Made by make_tracing()."""

    def __init__(self, provider: TracerProvider, tracer: Tracer, modules: Any) -> None:
        self._provider = provider
        self._tracer = tracer
        self._otel = modules
        self._offset_ns = time.time_ns() - time.monotonic_ns()  # spans carry the wall clock

    def begin(self, scope: Scope) -> RequestTrace:
        """Return the trace of a request that has just arrived."""
        headers = Headers(scope=scope)
        carrier = {name: headers[name] for name in _HEADERS if name in headers}
        began_s = time.monotonic()
        span = self._tracer.start_span(
            f"{scope['method']} {scope['path']}",
            context=self._otel.propagator.extract(carrier),
            kind=self._otel.SpanKind.SERVER,
            attributes={"http.request.method": scope["method"], "url.path": scope["path"]},
            start_time=self._ns(began_s),
        )
        return RequestTrace(span, began_s)

    def sending(self, trace: RequestTrace, send: Send) -> Send:
        """Return `send` with the trace's headers in the answer."""
        carrier: dict[str, str] = {}
        self._otel.propagator.inject(carrier, context=self._otel.set_span_in_context(trace.span))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(carrier)
                trace.span.set_attribute("http.response.status_code", message["status"])
            await send(message)

        return send_named

    def end(self, trace: RequestTrace, request_id: str, outcome: str) -> None:
        """Make all spans of a request that is over."""
        span = trace.span
        if not span.is_recording():
            return
        ended_s = time.monotonic()
        span.set_attributes({"moonpool.request_id": request_id, "moonpool.outcome": outcome})
        if outcome not in ("done", "cancelled"):
            span.set_status(self._otel.StatusCode.ERROR)
        for planned in trace.planned(ended_s):
            self._make(planned, span)
        span.end(self._ns(ended_s))

    def _make(self, planned: PlannedSpan, parent: Span) -> None:
        kinds = self._otel.SpanKind
        span = self._tracer.start_span(
            planned.name,
            context=self._otel.set_span_in_context(parent),
            kind=kinds.CLIENT if planned.is_call else kinds.INTERNAL,
            attributes=planned.attributes,
            start_time=self._ns(planned.begin_s),
        )
        if planned.is_error:
            span.set_status(self._otel.StatusCode.ERROR)
        for child in planned.children:
            self._make(child, span)
        span.end(self._ns(planned.end_s))

    def _ns(self, at_s: float) -> int:
        return round(at_s * 1e9) + self._offset_ns

    async def close(self) -> None:
        """Send the spans that wait, for _CLOSE_S at most: a collector that is away does not hold up the stop."""
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, _CLOSE_S)


def make_tracing(endpoint: str, instance: str) -> Tracing:
    """Return what sends traces to `endpoint`, an OTLP/HTTP collector. `instance` is this front end's name. Raise
    ConfigError if OpenTelemetry is not installed, or if `endpoint` is not an address."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp takes an address like http://127.0.0.1:4318, not {endpoint!r}", param="otlp")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError("--otlp needs OpenTelemetry: pip install 'moonpool[otel]'", param="otlp") from error
    names = {
        "service.name": "moonpool",
        "service.instance.id": instance,
        "service.version": moonpool.__version__,
    }
    provider = TracerProvider(resource=Resource.create(names), shutdown_on_exit=False)
    url = endpoint.rstrip("/")
    url = url if url.endswith(_TRACES_PATH) else url + _TRACES_PATH
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_EXPORT_S)))
    return Tracing(provider, provider.get_tracer("moonpool"), _modules())


def _modules() -> Any:
    """Return the names of OpenTelemetry's API that spans need."""
    from types import SimpleNamespace

    from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return SimpleNamespace(
        SpanKind=SpanKind,
        StatusCode=StatusCode,
        set_span_in_context=set_span_in_context,
        propagator=TraceContextTextMapPropagator(),
    )
