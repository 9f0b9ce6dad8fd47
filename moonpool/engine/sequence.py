"""One request inside an engine: its tokens, its pages, how far its KV is computed, and what a step did to it.

Pure data, no torch. Only the scheduler changes a Sequence; the runner sees Chunks, frozen copies of what one step
needs. Between steps:

    tokens  [ prompt ............ | output ....... ]
    KV      [ 0 .. num_computed_tokens )               in pages[i // block_tokens]
    keys    one chain key per full block of tokens, whether its KV is computed yet or not
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Sequence as Seq
from typing import Literal

import msgspec

from moonpool.base.errors import InvalidInput
from moonpool.base.keys import chain_keys, next_key

FinishReason = Literal["stop", "length", "handoff"]
UNKNOWN_TOKEN = -1  # in a chunk of a step that is launched before the step that samples the token was read


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are sampled and when to stop. Impossible values raise InvalidInput at construction."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None  # of the sampled token and the n most likely ones; None: no logprobs

    def __post_init__(self) -> None:
        _require("max_tokens", self.max_tokens >= 1, "at least 1")
        _require("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "between 0 and max_tokens")
        _require("temperature", 0 <= self.temperature < math.inf, "a number not below 0")
        _require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1")
        _require("top_k", self.top_k is None or self.top_k >= 1, "at least 1")
        _require("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        _require("seed", -(2**63) <= self.seed < 2**64, "a 64-bit integer")
        _require("presence_penalty", math.isfinite(self.presence_penalty), "a finite number")
        _require("frequency_penalty", math.isfinite(self.frequency_penalty), "a finite number")
        _require("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0")
        _require("logprobs", self.logprobs is None or self.logprobs >= 0, "not below 0")

    @property
    def penalizes(self) -> bool:
        """Whether a penalty for earlier tokens changes the distribution."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling values that a model's authors recommend, for requests without their own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def _require(param: str, holds: bool, must_be: str) -> None:
    if not holds:
        raise InvalidInput(f"{param} must be {must_be}", param=param)


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """What one step computes for one sequence: KV of `tokens` at the positions start, start + 1, ...

    `pages` is the block table of the whole sequence: it covers every position below start + len(tokens).
    """

    request_id: str
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    wants_logits: bool  # of the last token; true if the step samples a token

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


NO_LIMIT = sys.maxsize  # of Sequence.ahead_limit: leading blocks that may be pulled while the sequence waits


class SequenceStatus(enum.Enum):
    NEW = "new"  # not yet given to a scheduler
    WAITING = "waiting"  # for a place in the batch; has pages only if adopted
    RUNNING = "running"
    HELD = "held"  # finished, its pages kept until released
    GONE = "gone"  # finished or cancelled; holds nothing


class Sequence:
    """A request and its progress. The scheduler owns the fields below the line in __init__."""

    __slots__ = (
        "ahead_limit",
        "arrival",
        "block_tokens",
        "expected_tokens",
        "hold_pages",
        "keys",
        "limit",
        "num_alone_steps",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pool_blocks",
        "num_preemptions",
        "num_prompt_tokens",
        "num_sealed_blocks",
        "num_tokens",
        "pages",
        "params",
        "prefill_only",
        "request_id",
        "root",
        "status",
        "tenant",
        "tokens",
        "was_displaced",
        "weight",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Seq[int],
        params: SamplingParams,
        *,
        root: bytes,
        block_tokens: int,
        output: Seq[int] = (),
        num_pool_blocks: int = 0,
        prefill_only: bool = False,
        hold_pages: bool = False,
        num_alone_steps: int = 0,
        expected_tokens: int = 0,
        tenant: str = "",
        weight: float = 1.0,
    ) -> None:
        """`output` are tokens that another worker has sampled (before a hand-off, or before it died).

        The pool has promised its first `num_pool_blocks` blocks, which may be pulled while it waits. Its first
        `num_alone_steps` steps are computed in a batch of one. The conductor expects the KV of its first
        `expected_tokens` tokens to be reused. Tenants share the batch and the pages by their weights.
        """
        if not prompt:
            raise InvalidInput("the prompt is empty", param="prompt")
        self.request_id = request_id
        self.tokens: list[int] = [*prompt, *output]
        self.num_tokens = len(self.tokens)
        self.num_prompt_tokens = len(prompt)
        self.params = params
        self.root = root
        self.block_tokens = block_tokens
        self.keys: list[bytes] = chain_keys(root, self.tokens, block_tokens)
        self.num_pool_blocks = num_pool_blocks
        self.prefill_only = prefill_only
        self.hold_pages = hold_pages
        self.num_alone_steps = num_alone_steps
        self.expected_tokens = expected_tokens
        self.tenant, self.weight = tenant, weight
        # ---
        self.status = SequenceStatus.NEW
        self.arrival = 0
        self.limit = 0  # the number of tokens at which it ends at the latest
        self.pages: list[int] = []
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.was_displaced = False  # it lost its pages to another tenant; that happens once
        self.ahead_limit = NO_LIMIT
        self.num_sealed_blocks = 0  # leading blocks whose KV is complete and verified; never written again
        self.num_cached_tokens = 0  # prompt tokens reused, not computed, at the first admission

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_reusable_blocks(self) -> int:
        """How many leading blocks may be reused: at least one token is always computed."""
        return (self.num_tokens - 1) // self.block_tokens

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def append(self, token: int) -> None:
        """Append a sampled token; a block that it fills gets its key."""
        self.tokens.append(token)
        self.num_tokens += 1
        if self.num_tokens % self.block_tokens == 0:
            previous = self.keys[-1] if self.keys else self.root
            self.keys.append(next_key(previous, self.tokens[-self.block_tokens :]))

    def extend(self, token: int, count: int) -> None:
        """Append `token` `count` times."""
        for _ in range(count):
            self.append(token)

    def chunk(self, num_tokens: int) -> Chunk:
        """Return the next `num_tokens` uncomputed tokens as a chunk."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + num_tokens
        return Chunk(
            request_id=self.request_id,
            start=start,
            tokens=tuple(self.tokens[start:end]),
            pages=tuple(self.pages),
            wants_logits=end == self.num_tokens,
        )


def pages_for(num_tokens: int, block_tokens: int) -> int:
    """Return how many pages the KV of `num_tokens` tokens needs."""
    return -(-num_tokens // block_tokens)


class AdmittedSequence(msgspec.Struct, frozen=True, gc=False):
    """A sequence that entered the batch. Its `blocks` are on their way from the pool into `pages`: a step waits for
    each layer before it reads it. A pull has its blocks in the same form."""

    request_id: str
    num_local_blocks: int  # reused from this worker's own pages
    blocks: tuple[int, ...]
    pages: tuple[int, ...]
    keys: tuple[bytes, ...]
    num_ahead_blocks: int = 0  # of the local ones, pulled from the pool while it waited


class FullBlock(msgspec.Struct, frozen=True, gc=False):
    """A block that this step completed. Its bytes stay in `page` until pages are next allocated, or as long as
    `PageManager.hold` keeps them."""

    request_id: str
    index: int
    page: int
    key: bytes
    parent: bytes | None = None  # the key of the block before it


class Accepted(msgspec.Struct, frozen=True, gc=False):
    """A token that was appended to its sequence, and the reason if it was the last one."""

    request_id: str
    token: int
    finish_reason: FinishReason | None
    num_cached_tokens: int


class StepResult(msgspec.Struct, frozen=True):
    accepted: list[Accepted] = msgspec.field(default_factory=list)
    full_blocks: list[FullBlock] = msgspec.field(default_factory=list)


def full_blocks(sequence: Sequence, indices: range) -> list[FullBlock]:
    """Return these blocks of a sequence."""
    keys, pages = sequence.keys, sequence.pages
    return [
        FullBlock(sequence.request_id, index, pages[index], keys[index], keys[index - 1] if index else None)
        for index in indices
    ]
