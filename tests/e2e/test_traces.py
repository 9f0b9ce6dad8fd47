"""`moonpool serve --otlp`: one trace per request at a real collector, with the right parents and nested times."""

from __future__ import annotations

import httpx
from e2e_service import Service
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from otlp_receiver import Collector
from waiting import HANG_S, wait_until

STORY = "A river town kept its ledgers in one deep cellar, and every clerk copied the same pages each morning. " * 12


def complete(service: Service, **changes: object) -> httpx.Response:
    headers = changes.pop("headers", {})
    body = {"model": "small", "prompt": STORY, "max_tokens": 4, "temperature": 0, **changes}
    return httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, trust_env=False, timeout=HANG_S)  # type: ignore[arg-type]


def trace_of(collector: Collector, reply: httpx.Response, num_spans: int) -> tuple[Span, dict[str, Span]]:
    """Return the request's own span and the others by name, once at least `num_spans` have come."""
    _, trace_id, span_id, _ = reply.headers["traceparent"].split("-")
    wait_until(lambda: len(collector.trace(trace_id)) >= num_spans, f"{num_spans} spans of {trace_id}")
    spans = collector.trace(trace_id)
    (root,) = [each for each in spans if each.span_id.hex() == span_id]
    return root, {each.name: each for each in spans if each is not root}


def check_nested(root: Span, others: dict[str, Span], parents: dict[str, str]) -> None:
    found = {**others, root.name: root}
    for name, parent in parents.items():
        child, above = found[name], found[parent or root.name]
        assert child.parent_span_id == above.span_id, f"{name} belongs to {parent or root.name}"
        assert above.start_time_unix_nano <= child.start_time_unix_nano, name
        assert child.start_time_unix_nano <= child.end_time_unix_nano <= above.end_time_unix_nano, name
    assert set(others) == set(parents)


WAY = {"prepare": "", "attempt": "", "route": "attempt", "queue": "attempt", "prefill": "attempt"} | {
    "hand-off": "attempt",
    "decode": "attempt",
}


def test_one_trace_from_the_client_to_decode(one_each: Service, collector: Collector) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    reply = complete(one_each, headers={"traceparent": parent, "tracestate": "vendor=1"})
    assert reply.status_code == 200, reply.text
    assert reply.headers["traceparent"].startswith("00-0af7651916cd43dd8448eb211c80319c-")
    assert reply.headers["tracestate"] == "vendor=1"
    root, others = trace_of(collector, reply, 8)
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    assert root.trace_state == "vendor=1"
    assert root.name == "POST /v1/completions"
    assert root.kind == Span.SPAN_KIND_SERVER
    check_nested(root, others, WAY)
    facts = {each.key: each.value for each in root.attributes}
    assert facts["moonpool.request_id"].string_value == reply.headers["x-request-id"]
    assert facts["http.response.status_code"].int_value == 200
    assert collector.resources[0]["service.name"] == "moonpool"


def test_blocks_from_the_pool_are_a_pull_of_their_tier(one_each: Service, collector: Collector) -> None:
    prompt = f"Another one. {STORY}"
    assert complete(one_each, prompt=prompt).status_code == 200
    one_each.kill_and_wait_back("prefill-0")  # its own pages are gone: what is reused comes from the pool
    reply = complete(one_each, prompt=prompt)
    root, others = trace_of(collector, reply, 9)
    # The pull has ended before the prompt is in a step, or goes on in it.
    was_over = others["pull dram"].parent_span_id == others["queue"].span_id
    check_nested(root, others, {**WAY, "pull dram": "queue" if was_over else "prefill"})
    tokens = {each.key: each.value.int_value for each in others["pull dram"].attributes}
    check_layers(one_each, reply.headers["x-request-id"])
    assert tokens["moonpool.tokens"] == reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def check_layers(service: Service, request_id: str) -> None:
    """The record says when each layer had been pulled; the list of records, which is read often, does not."""
    (explained,) = httpx.get(f"{service.url}/v1/records/{request_id}", trust_env=False).json()["data"]
    parts = explained["record"]["parts"]
    assert len(parts["pull_layers_s"]) == 4, "the small model has 4 layers"
    assert parts["pull_layers_s"] == sorted(parts["pull_layers_s"])
    assert parts["pull_layers_s"][-1] <= parts["pull_s"]
    newest = httpx.get(f"{service.url}/v1/records?limit=1", trust_env=False).json()["data"][-1]
    assert (newest["request_id"], newest["parts"]["pull_layers_s"]) == (explained["record"]["request_id"], [])


def test_a_refused_request_is_an_error_and_an_unsampled_one_is_not_sent(
    one_each: Service, collector: Collector
) -> None:
    unsampled = "00-11111111111111111111111111111111-2222222222222222-00"
    reply = complete(one_each, headers={"traceparent": unsampled})
    assert reply.headers["traceparent"].startswith("00-11111111111111111111111111111111-")
    assert reply.headers["traceparent"].endswith("-00")
    refused = complete(one_each, max_tokens=-1)
    assert refused.status_code == 400
    root, others = trace_of(collector, refused, 2)
    assert set(others) == {"prepare"}
    assert root.status.code == Status.STATUS_CODE_ERROR
    assert collector.trace("1" * 32) == [], "sent before the refused one, so it would be here"
