"""Turns decision records into a trace that can be replayed, in Mooncake's JSONL. It holds numbers only: no keys, no
text.

One line per request: {"timestamp": ms since the first, "input_length", "output_length", "hash_ids", "block_tokens"}.
`block_tokens`, the size of the trace's blocks, is left out where it is Mooncake's 512. By default it is the pool's own
block size, because larger blocks lose reuse: a large block that is shared in part is not shared at all. hash_ids has
one number for each block of the prompt, including a partial last one; two blocks have the same number exactly when they
and all blocks before them are known to be equal. Numbers are given in order of first appearance. A block that is not
known to be shared gets a new number: the tail of a prompt behind its last full block, and prompts without
fingerprints. So a replay never sees more reuse than there was.

The numbering takes about 100 bytes per distinct block during the export.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from moonpool.base.errors import ConfigError
from moonpool.conductor.records.store import PRINT_NBYTES, KeptRecord

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class ExportConfig:
    """`trace_block_tokens` is a multiple of block_tokens."""

    block_tokens: int
    trace_block_tokens: int | None = None  # None: as block_tokens

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.group_tokens < 1 or self.group_tokens % self.block_tokens:
            raise ConfigError(
                f"blocks of {self.block_tokens} tokens cannot be regrouped to {self.group_tokens}",
                param="trace_block_tokens",
            )

    @property
    def group_tokens(self) -> int:
        """Tokens per block of the trace."""
        return self.block_tokens if self.trace_block_tokens is None else self.trace_block_tokens


class TraceLine(msgspec.Struct, frozen=True, omit_defaults=True):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


class TraceExport:
    """Turns records into lines, one at a time and in the order given."""

    def __init__(self, config: ExportConfig) -> None:
        self._config = config
        self._numbers: dict[bytes, int] = {}
        self._next_number = 0
        self._first_s: float | None = None
        self._last_ms = 0

    def line(self, kept: KeptRecord) -> TraceLine | None:
        """Return the record's line, or None for a request without output (refused, failed or still open)."""
        record = kept.record
        if not record.output_tokens:
            return None
        hash_ids = [self._number(one) for one in self._chain(record.num_tokens, kept.prints)]
        stamp = self._timestamp(record.routed_at_s)
        return TraceLine(stamp, record.num_tokens, record.output_tokens, hash_ids, self._config.group_tokens)

    def _timestamp(self, at_s: float) -> int:
        """Return ms since the first record; a wall clock that was set back stands still, so timestamps never fall."""
        if self._first_s is None:
            self._first_s = at_s
        self._last_ms = max(self._last_ms, round((at_s - self._first_s) * 1e3))
        return self._last_ms

    def _chain(self, num_tokens: int, prints: bytes) -> Iterator[bytes | None]:
        """Yield for each block of the trace the fingerprint of its last chain key, which covers all blocks before it,
        or None if it is not known."""
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
