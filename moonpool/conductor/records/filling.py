"""How a decision record fills: when it is opened, sent, refused and over. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.base.errors import MoonpoolError
from moonpool.conductor.messages import Decision, DecisionRecord, RequestEnded, Route


def open_record(call: Route, wall_s: float) -> DecisionRecord:
    return DecisionRecord(
        request_id=call.request_id,
        routed_at_s=wall_s,
        num_tokens=call.num_tokens,
        max_tokens=call.max_tokens,
        priority=call.priority,
    )


def note_decision(record: DecisionRecord, decision: Decision) -> None:
    record.prefill, record.decode = decision.prefill.name, decision.decode.name
    record.pool_blocks, record.candidates = decision.pool_blocks, decision.candidates
    record.predicted_ttft_s, record.predicted_tbt_s = decision.ttft_s, decision.tbt_s
    record.outcome, record.waited_s = "open", decision.waited_s


def note_refusal(record: DecisionRecord, error: MoonpoolError, waited_s: float) -> None:
    record.outcome, record.reason, record.waited_s = error.code, str(error), waited_s


def note_end(record: DecisionRecord, call: RequestEnded) -> None:
    record.outcome, record.measured_ttft_s, record.measured_tbt_s = call.outcome, call.ttft_s, call.tbt_s
    record.cached_tokens, record.pool_tokens = call.cached_tokens, call.pool_tokens
    record.output_tokens = call.output_tokens


def first_missed(keys: Sequence[bytes], num_tokens: int, cached_tokens: int, block_tokens: int) -> bytes | None:
    """The key of the first block that was not reused although it could have been: the last token is always computed,
    so a block that ends with it does not count."""
    number = cached_tokens // block_tokens
    return keys[number] if number < len(keys) and (number + 1) * block_tokens < num_tokens else None
