"""Simulated sequences for the real scheduler: the number of their tokens is known, the tokens are not.

A trace names the blocks of a prompt by numbers, and the keys are made from the numbers: prompts with the same number
share KV. Blocks that a request writes while it decodes get keys that no other request has, because a trace does not say
which later prompt contains an answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import cast

from moonpool.base.keys import KEY_NBYTES
from moonpool.engine.sequence import NO_LIMIT, Chunk, SamplingParams, Sequence, SequenceStatus

_PADDING = bytes(KEY_NBYTES - 8)
_FIRST_OUTPUT = 1 << 56  # block numbers of answers start here
_MAX_OUTPUT_BLOCKS = 1 << 16
TOKEN = 0


def block_keys(numbers: Iterable[int]) -> list[bytes]:
    """Return the chain keys of a trace's blocks. The number is where fingerprints of keys are taken from."""
    return [(number << 4).to_bytes(8, "little") + _PADDING for number in numbers]


def block_key(number: int) -> bytes:
    return (number << 4).to_bytes(8, "little") + _PADDING


def block_number(key: bytes) -> int:
    """Return the block number of a block key, or of the object key made from one."""
    return int.from_bytes(key[:8], "little") >> 4


@cache
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


class SimSequence(Sequence):
    """`keys` are the keys of the full blocks of the prompt; the keys of the answer's blocks are made from `number`."""

    __slots__ = ("_number",)

    def __init__(
        self,
        request_id: str,
        number: int,
        num_prompt: int,
        max_tokens: int,
        keys: list[bytes],
        block_tokens: int,
        *,
        num_output: int = 0,
        prefill_only: bool = False,
        hold_pages: bool = False,
        expected_tokens: int = 0,
    ) -> None:
        assert len(keys) == num_prompt // block_tokens, "one key for each full block"
        self._number = number
        self.request_id = request_id
        self.tokens = []
        self.num_tokens = self.num_prompt_tokens = num_prompt
        self.params = _params(max_tokens)
        self.root = b""
        self.block_tokens = block_tokens
        self.keys = keys
        self.num_pool_blocks = 0
        self.prefill_only, self.hold_pages = prefill_only, hold_pages
        self.status = SequenceStatus.NEW
        self.arrival = self.limit = 0
        self.pages = []
        self.num_computed_tokens = self.num_preemptions = self.num_sealed_blocks = self.num_cached_tokens = 0
        self.ahead_limit = NO_LIMIT
        self.expected_tokens = expected_tokens
        self.num_alone_steps = 0  # not simulated: the few steps that a suspect request runs alone
        self.tenant, self.weight, self.was_displaced = "", 1.0, False  # nor how tenants share a batch
        self.extend(TOKEN, num_output)

    def append(self, token: int) -> None:
        self.extend(token, 1)

    def extend(self, token: int, count: int) -> None:
        self.num_tokens += count
        num_blocks = self.num_tokens // self.block_tokens
        if num_blocks > len(self.keys):
            first = _FIRST_OUTPUT + self._number * _MAX_OUTPUT_BLOCKS
            self.keys = self.keys + block_keys(range(first + len(self.keys), first + num_blocks))

    def chunk(self, num_tokens: int) -> Chunk:
        """Return a chunk whose tokens are positions and which has no pages: nothing is computed from it."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + num_tokens
        return Chunk(
            request_id=self.request_id,
            start=start,
            tokens=cast("tuple[int, ...]", range(start, end)),
            pages=(),
            wants_logits=end == self.num_tokens,
        )
