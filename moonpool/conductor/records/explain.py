"""Explains a decision record in sentences, for `moonpool why REQUEST_ID`. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from moonpool.conductor.messages import Candidate, DecisionRecord

_MAX_CANDIDATES = 5


def explain(record: DecisionRecord, block_tokens: int, missed: str | None = None) -> list[str]:
    """Return sentences about the request, in the order of events. The record may still be open. `missed` is what the
    pool says about the first block that was not reused."""
    chosen = next((one for one in record.candidates if one.worker == record.prefill), None)
    lines = [*_asked(record), *_went(record)]
    if chosen is not None:
        lines += [*_candidates(record, chosen), *_blocks(record, chosen, block_tokens)]
    if missed is not None:
        lines.append(f"The first block that was not reused: {missed.rstrip('.')}.")
    return [*lines, *_ended(record)]


def _asked(record: DecisionRecord) -> Iterator[str]:
    attempt = f", attempt {record.attempt} after a worker failed it" if record.attempt > 1 else ""
    yield (
        f"Request {record.request_id}: {_many(record.num_tokens, 'prompt token')}, "
        f"at most {record.max_tokens} to answer with{attempt}."
    )


def _went(record: DecisionRecord) -> Iterator[str]:
    if record.prefill is None or record.decode is None:
        yield from _not_sent(record)
        return
    if record.waited_s > 0:
        yield f"It waited {_seconds(record.waited_s)} for its turn."
    expected = []
    if record.predicted_ttft_s is not None:
        expected.append(f"the first token after {_seconds(record.predicted_ttft_s)}")
    if record.predicted_tbt_s is not None:
        expected.append(f"then one every {_seconds(record.predicted_tbt_s)}")
    ending = f", expecting {' and '.join(expected)}" if expected else ""
    if record.prefill == record.decode:
        yield f"Its answer went on at {record.decode}, which took its KV from the pool."
        return
    yield f"It went to {record.prefill} for its prompt and to {record.decode} for its answer{ending}."


def _not_sent(record: DecisionRecord) -> Iterator[str]:
    if record.outcome == "open":
        yield "It waits for its turn."
        return
    after = f" after {_seconds(record.waited_s)} of waiting for its turn" if record.waited_s > 0 else ""
    reason = f" ({record.reason})" if record.reason is not None else ""
    yield f"It was sent nowhere{after}: {record.outcome.replace('_', ' ')}{reason}."


def _candidates(record: DecisionRecord, chosen: Candidate) -> Iterator[str]:
    yield f"{chosen.worker} was chosen: {_terms(chosen)}."
    others = sorted((one for one in record.candidates if one is not chosen), key=lambda one: (one.ttft_s, one.worker))
    for other in others[:_MAX_CANDIDATES]:
        later_s = other.ttft_s - chosen.ttft_s
        compared = (
            f"{_seconds(later_s)} later" if later_s > 0 else "no later; others counted for less or it was its turn"
        )
        yield f"{other.worker} was not: {_terms(other)}; {compared}."
    if len(others) > _MAX_CANDIDATES:
        yield f"{_many(len(others) - _MAX_CANDIDATES, 'more worker')} would have been later still."


def _terms(one: Candidate) -> str:
    overlap = f" - {_seconds(one.overlap_s)} of both at once" if one.overlap_s > 1e-9 else ""
    is_short = one.pages_s > one.queue_s
    waits = f"{_seconds(one.pages_s)} for pages to decode in" if is_short else f"{_seconds(one.queue_s)} in its queue"
    handoff = f", then {_seconds(one.handoff_s)} to hand its KV over" if one.handoff_s > 1e-9 else ""
    return (
        f"{_seconds(one.ttft_s)} = {waits} + {_seconds(one.transfer_s)} to pull "
        f"{_many(one.pulled_blocks, 'block')} + {_seconds(one.prefill_s)} to compute{overlap}{handoff} "
        f"({_many(one.local_blocks, 'block')} of its own)"
    )


def _blocks(record: DecisionRecord, chosen: Candidate, block_tokens: int) -> Iterator[str]:
    total = record.num_tokens // block_tokens
    if total == 0:
        yield (
            f"Its prompt is shorter than one block of {block_tokens} tokens, so all of it was computed: "
            "only full blocks are kept and used again."
        )
        return
    reused = chosen.local_blocks + chosen.pulled_blocks
    yield (
        f"Of its {_many(total, 'full block')}, {chosen.local_blocks} were expected in {chosen.worker}'s pages, "
        f"{chosen.pulled_blocks} were to be pulled from the pool, {max(0, total - reused)} to be computed."
    )
    not_pulled = min(record.pool_blocks, total) - reused
    if not_pulled > 0:
        yield f"{_many(not_pulled, 'more block')} lay in the pool: computing them again was expected to take no longer."
    unknown = total - max(record.pool_blocks, reused)
    if unknown > 0:
        yield f"{_many(unknown, 'block')} were known nowhere: never computed with this beginning, or evicted since."
    if record.measured_ttft_s is not None:
        yield from _found(record, chosen, reused, block_tokens)


def _found(record: DecisionRecord, chosen: Candidate, expected: int, block_tokens: int) -> Iterator[str]:
    local = record.cached_tokens - record.pool_tokens
    yield (
        f"In fact {_many(record.cached_tokens, 'token')} were reused: {local} from {chosen.worker}'s pages, "
        f"{record.pool_tokens} from the pool."
    )
    # A full hit still computes its last token, so one block less is as expected.
    missing = min(expected * block_tokens, record.num_tokens - 1) - record.cached_tokens
    if missing >= block_tokens:
        yield (
            f"That is {missing} fewer than expected: blocks were evicted, dropped or failed their check between "
            "the decision and the look-up."
        )
    elif missing <= -block_tokens:
        yield f"That is {-missing} more than expected: blocks came in after the decision."


def _ended(record: DecisionRecord) -> Iterator[str]:
    if record.measured_ttft_s is not None:
        against = ""
        if record.predicted_ttft_s:
            off = record.measured_ttft_s / record.predicted_ttft_s - 1
            against = f", {abs(off):.0%} {'later' if off >= 0 else 'earlier'} than predicted"
        yield f"The first token came after {_seconds(record.measured_ttft_s)}{against}."
    if record.outcome == "open":
        yield "It is still on its way."
    elif record.prefill is not None:
        yield f"It ended as {record.outcome.replace('_', ' ')} with {_many(record.output_tokens, 'token')} of answer."


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
