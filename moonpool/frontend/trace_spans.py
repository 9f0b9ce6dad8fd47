"""From what the front end knows of a request to the spans of its trace. Pure: no clock, no OpenTelemetry.

Worker spans are placed by the durations that the prefill worker reports, backwards from when its reply with the first
token arrived: computing ends there, waiting in the worker's queue before that. The hand-off begins there, and decoding
follows it. What was lost on the way to the worker and in reserving pages stays a gap after the decision. A child never
begins before its parent or ends after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from moonpool.worker.messages import PrefillReply

Attributes: TypeAlias = dict[str, str | int | float | bool]


@dataclass(slots=True)
class AttemptTimes:
    """When things happened to one attempt of one choice, in seconds of one clock. None: it did not come to that."""

    choice: int
    number: int
    began_s: float
    routed_s: float | None = None
    prefill_worker: str = ""
    decode_worker: str = ""
    replied_s: float | None = None  # when the reply of the prefill worker came
    reply: PrefillReply | None = None
    handoff_s: float | None = None  # from its first token until the decode worker had the KV
    num_tokens: int = 0  # of the answer, from this attempt
    ended_s: float | None = None
    outcome: str = "cancelled"


@dataclass(frozen=True, slots=True)
class PlannedSpan:
    name: str
    begin_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)
    children: tuple[PlannedSpan, ...] = ()
    is_error: bool = False
    is_call: bool = False  # of another role


def attempt_span(times: AttemptTimes) -> PlannedSpan:
    """Return the span of an attempt that has ended, with its children."""
    ended_s = times.began_s if times.ended_s is None else times.ended_s
    found: Attributes = {
        "moonpool.choice": times.choice,
        "moonpool.attempt": times.number,
        "moonpool.outcome": times.outcome,
        "moonpool.output_tokens": times.num_tokens,
    }
    if times.prefill_worker:
        found |= {"moonpool.prefill_worker": times.prefill_worker, "moonpool.decode_worker": times.decode_worker}
    is_error = times.outcome not in ("done", "moved", "cancelled")
    children = tuple(_children(times, ended_s))
    return PlannedSpan("attempt", times.began_s, ended_s, found, children, is_error=is_error)


def _children(times: AttemptTimes, ended_s: float) -> Iterator[PlannedSpan]:
    routed_s = times.routed_s
    yield PlannedSpan("route", times.began_s, ended_s if routed_s is None else routed_s, is_call=True)
    if routed_s is None:
        return
    decode_from_s = routed_s
    if times.reply is not None and times.replied_s is not None:
        yield from _prefill(times.reply, routed_s, times.replied_s, times.prefill_worker)
        if times.reply.finish_reason is not None:
            return
        decode_from_s = min(ended_s, times.replied_s + (times.handoff_s or 0.0))
        if times.handoff_s is not None:
            yield PlannedSpan("hand-off", times.replied_s, decode_from_s, {"moonpool.worker": times.prefill_worker})
    elif not times.num_tokens:
        return  # it failed before a token came
    attributes: Attributes = {"moonpool.worker": times.decode_worker, "moonpool.output_tokens": times.num_tokens}
    yield PlannedSpan("decode", decode_from_s, ended_s, attributes, is_call=True)


def _prefill(reply: PrefillReply, from_s: float, until_s: float, worker: str) -> Iterator[PlannedSpan]:
    computed_s = max(from_s, until_s - reply.compute_s)
    arrived_s = max(from_s, computed_s - reply.queue_s)
    name: Attributes = {"moonpool.worker": worker}
    pull_end_s = min(until_s, computed_s + reply.pull_s)
    # A pull that took no time of the step went on while the prompt waited (worker/kv_link/pull_ahead.py).
    ahead = reply.pull_s == 0
    pulls = tuple(_pulls(reply, *((arrived_s, computed_s) if ahead else (computed_s, pull_end_s))))
    yield PlannedSpan("queue", arrived_s, computed_s, name, pulls if ahead else ())
    tokens: Attributes = {"moonpool.own_tokens": reply.local_tokens, "moonpool.pool_tokens": reply.pool_tokens}
    yield PlannedSpan("prefill", computed_s, until_s, {**name, **tokens}, () if ahead else pulls, is_call=True)


def _pulls(reply: PrefillReply, begin_s: float, end_s: float) -> Iterator[PlannedSpan]:
    """Yield one span per tier of the pool: a pull reads all of them at the same time."""
    dram = reply.pool_tokens - reply.ssd_tokens - reply.remote_tokens
    for tier, num_tokens in (("dram", dram), ("ssd", reply.ssd_tokens), ("remote", reply.remote_tokens)):
        if num_tokens > 0:
            yield PlannedSpan(f"pull {tier}", begin_s, end_s, {"moonpool.tier": tier, "moonpool.tokens": num_tokens})


def request_spans(
    began_s: float, prepared_s: float | None, attempts: Sequence[AttemptTimes], ended_s: float
) -> list[PlannedSpan]:
    """Return the children of a request's own span, which is from `began_s` to `ended_s`."""
    prepare = PlannedSpan("prepare", began_s, ended_s if prepared_s is None else prepared_s)
    return [prepare, *(attempt_span(each) for each in attempts)]
