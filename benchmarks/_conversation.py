"""The conversation trace of FAST'25, or one of its character where it is not at hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from moonpool.traces import Trace, read_jsonl, slice_count
from moonpool.traces.generate import generate

CONVERSATION = Path(__file__).resolve().parents[2] / "shared" / "traces" / "conversation_trace.jsonl"
NUM_REQUESTS = 12_031
RATE_PER_S = NUM_REQUESTS / 3537
_SEED = 1


@cache
def conversation(num_requests: int = NUM_REQUESTS) -> Trace:
    """From its beginning."""
    if CONVERSATION.exists():
        return slice_count(read_jsonl(CONVERSATION), 0, num_requests)
    return generate("chat", num_requests=num_requests, rate_per_s=RATE_PER_S, seed=_SEED)


def origin() -> str:
    return "conversation trace" if CONVERSATION.exists() else "generated trace"
