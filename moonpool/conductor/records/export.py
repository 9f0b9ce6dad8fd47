"""Decision records as a trace that can be replayed: Mooncake's JSONL. Only numbers leave: no keys, no text, no names.

One line per request: {"timestamp": ms since the first, "input_length", "output_length", "hash_ids", "block_tokens"}.
`block_tokens`, the size of the trace's blocks, is left out where it is Mooncake's 512; by default it is the pool's own
size, for larger blocks lose reuse: a large block that is shared in part is not shared at all. hash_ids has one number
for each block of the prompt, also for the last and partial one; blocks have the same number exactly when they and all
before them are known to be the same. Numbers are given by first appearance. What cannot be known to be shared gets a
number of its own: the tail of a prompt that is no full block of ours, and prompts whose fingerprints were given up. So
a replay never sees more reuse than there was.

The numbering takes about 100 bytes for each different block while the export runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from moonpool.base.errors import ConfigError
from moonpool.conductor.records.store import PRINT_NBYTES, KeptRecord

MOONCAKE_BLOCK_TOKENS = 512
_PROGRESS_EVERY = 256


@dataclass(frozen=True, slots=True)
class ExportConfig:
    """`trace_block_tokens` is a multiple of block_tokens. A request without output (refused, failed, still open) is
    left out, unless `unanswered_output_tokens` says how long an answer to assume: the load that was offered."""

    block_tokens: int
    trace_block_tokens: int | None = None  # None: as block_tokens
    unanswered_output_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.group_tokens < 1 or self.group_tokens % self.block_tokens:
            raise ConfigError(
                f"blocks of {self.block_tokens} tokens cannot be regrouped to {self.group_tokens}",
                param="trace_block_tokens",
            )
        if self.unanswered_output_tokens is not None and self.unanswered_output_tokens < 1:
            raise ConfigError("an answer has at least one token", param="unanswered_output_tokens")

    @property
    def group_tokens(self) -> int:
        """Tokens of one block of the trace."""
        return self.block_tokens if self.trace_block_tokens is None else self.trace_block_tokens


class TraceLine(msgspec.Struct, frozen=True, omit_defaults=True):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


class ExportSummary(NamedTuple):
    num_requests: int
    num_blocks: int
    num_distinct_blocks: int
    num_left_out: int
    num_without_prints: int


class Writable(Protocol):
    def write(self, data: bytes, /) -> object: ...


class TraceExport:
    """Turns records into lines, one at a time and in the order given, and counts."""

    def __init__(self, config: ExportConfig) -> None:
        self._config = config
        self._numbers: dict[bytes, int] = {}
        self._next_number = 0
        self._first_s: float | None = None
        self._last_ms = 0
        self._num_requests = self._num_blocks = self._num_left_out = self._num_without_prints = 0

    def line(self, kept: KeptRecord) -> TraceLine | None:
        """None when it is left out."""
        record = kept.record
        output_tokens = record.output_tokens or self._config.unanswered_output_tokens
        if output_tokens is None:
            self._num_left_out += 1
            return None
        hash_ids = self._hash_ids(record.num_tokens, kept.prints)
        self._num_requests += 1
        self._num_blocks += len(hash_ids)
        self._num_without_prints += not kept.prints and record.num_tokens >= self._config.block_tokens
        stamp = self._timestamp(record.routed_at_s)
        return TraceLine(stamp, record.num_tokens, output_tokens, hash_ids, self._config.group_tokens)

    def summary(self) -> ExportSummary:
        return ExportSummary(
            self._num_requests, self._num_blocks, self._next_number, self._num_left_out, self._num_without_prints
        )

    def _timestamp(self, at_s: float) -> int:
        """A wall clock that was set back stands still here: timestamps never fall."""
        if self._first_s is None:
            self._first_s = at_s
        self._last_ms = max(self._last_ms, round((at_s - self._first_s) * 1e3))
        return self._last_ms

    def _hash_ids(self, num_tokens: int, prints: bytes) -> list[int]:
        return [self._number(one) for one in self._chain(num_tokens, prints)]

    def _chain(self, num_tokens: int, prints: bytes) -> Iterator[bytes | None]:
        """For each block of the trace the fingerprint of its last token's chain, which stands for all before it."""
        own, group = self._config.block_tokens, self._config.group_tokens
        for begin in range(0, num_tokens, group):
            end = min(begin + group, num_tokens)
            at = (end // own - 1) * PRINT_NBYTES
            known = end % own == 0 and at + PRINT_NBYTES <= len(prints)
            yield prints[at : at + PRINT_NBYTES] if known else None

    def _number(self, fingerprint: bytes | None) -> int:
        if fingerprint is not None and fingerprint in self._numbers:
            return self._numbers[fingerprint]
        number = self._next_number
        self._next_number += 1
        if fingerprint is not None:
            self._numbers[fingerprint] = number
        return number


def write_trace(
    records: Iterable[KeptRecord],
    out: Writable,
    config: ExportConfig,
    progress: Callable[[int], None] | None = None,
) -> ExportSummary:
    """Writes line by line; `progress` is told now and then, and at the end, how many records are done."""
    export, encoder, done = TraceExport(config), msgspec.json.Encoder(), 0
    for done, kept in enumerate(records, 1):
        line = export.line(kept)
        if line is not None:
            out.write(encoder.encode(line) + b"\n")
        if progress is not None and done % _PROGRESS_EVERY == 0:
            progress(done)
    if progress is not None:
        progress(done)
    return export.summary()
