"""Answers that go on at another decode worker, which brings their KV from the pool, without a prefill worker. Pure."""

from __future__ import annotations

from moonpool.conductor.messages import Candidate, Route
from moonpool.conductor.placement.policy import PlacementChoice

# A decode worker computes at most this many full blocks of such an answer: its other answers wait meanwhile. After a
# crash the blocks that waited to be put are missing.
_MAX_COMPUTED_BLOCKS = 4


def may_resume(call: Route, num_stored: int, block_tokens: int) -> bool:
    """Return whether the request is an answer whose KV the pool has, but for a few blocks. `num_stored` are the leading
    blocks that the prefix index knows of; it may be behind."""
    num_missing = (call.num_tokens - 1) // block_tokens - num_stored
    return call.has_output and (call.is_stored or (num_stored > 0 and num_missing <= _MAX_COMPUTED_BLOCKS))


def resumed(choice: PlacementChoice, decode: str) -> PlacementChoice:
    """Return the same choice of a decode worker, which also does what is left to do for the prompt: nothing that takes
    long."""
    itself = Candidate(worker=decode, local_blocks=0, pulled_blocks=0, transfer_s=0.0, queue_s=0.0, prefill_s=0.0)
    return choice._replace(prefill=itself, candidates=(), max_pool_blocks=None)
