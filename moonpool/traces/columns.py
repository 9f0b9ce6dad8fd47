"""A trace in memory: one numpy column per field, the block ids of all requests in one flat array.

A `Trace` is immutable: its columns are read-only, and changes make a new trace (`changes.py`). Arrivals are sorted.
Request i has ceil(num_input / block_tokens) chained block ids: two requests that share a block id share all blocks
before it. The last block of a request may be partial and has an id, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import InvalidInput

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
MOONCAKE_BLOCK_TOKENS = 512


class TraceRequest(NamedTuple):
    """One row. `block_ids` is a read-only view into the trace."""

    arrival_s: float
    num_input: int
    num_output: int
    block_ids: Ints


@dataclass(frozen=True, eq=False, kw_only=True)
class Trace:
    """Takes ownership of the arrays. Raises InvalidInput if they are inconsistent."""

    name: str = "trace"
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    arrival_s: Floats
    num_input: Ints
    num_output: Ints
    block_ids: Ints  # of all requests in a row
    block_offsets: Ints  # request i has block_ids[block_offsets[i] : block_offsets[i + 1]]
    tenant: Ints | None = None
    priority: Ints | None = None

    def __post_init__(self) -> None:
        self._freeze("arrival_s", np.float64)
        for column in ("num_input", "num_output", "block_ids", "block_offsets", "tenant", "priority"):
            if getattr(self, column) is not None:
                self._freeze(column, np.int64)
        self._check()

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __eq__(self, other: object) -> bool:
        """Compare the contents, without the name."""
        if not isinstance(other, Trace):
            return NotImplemented
        columns = ("arrival_s", "num_input", "num_output", "block_ids", "block_offsets", "tenant", "priority")
        return self.block_tokens == other.block_tokens and all(
            _same(getattr(self, column), getattr(other, column)) for column in columns
        )

    __hash__ = None  # type: ignore[assignment]  # comparing is slow: no accidental use as a key

    def __iter__(self) -> Iterator[TraceRequest]:
        ids = self.block_ids
        bounds = self.block_offsets.tolist()
        columns = zip(self.arrival_s.tolist(), self.num_input.tolist(), self.num_output.tolist(), strict=True)
        for index, (arrival_s, num_input, num_output) in enumerate(columns):
            yield TraceRequest(arrival_s, num_input, num_output, ids[bounds[index] : bounds[index + 1]])

    @property
    def num_blocks(self) -> Ints:
        """Return the number of blocks of each request."""
        return np.diff(self.block_offsets)

    @property
    def duration_s(self) -> float:
        """Return the time from the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    def block_owners(self) -> Ints:
        """Return the request of each entry of `block_ids`."""
        return np.repeat(np.arange(len(self)), self.num_blocks)

    def select(self, rows: Ints) -> Trace:
        """Return the trace of these rows in this order; their arrivals must be sorted."""
        counts = self.num_blocks[rows]
        offsets = offsets_of(counts)
        where = np.arange(offsets[-1]) + np.repeat(self.block_offsets[rows] - offsets[:-1], counts)
        return self.replace(
            arrival_s=self.arrival_s[rows],
            num_input=self.num_input[rows],
            num_output=self.num_output[rows],
            block_ids=self.block_ids[where],
            block_offsets=offsets,
            tenant=None if self.tenant is None else self.tenant[rows],
            priority=None if self.priority is None else self.priority[rows],
        )

    def replace(self, **columns: Any) -> Trace:
        """Return this trace with some fields replaced."""
        fields = {field: getattr(self, field) for field in self.__dataclass_fields__}
        return Trace(**(fields | columns))

    def _freeze(self, column: str, dtype: type[np.generic]) -> None:
        values = np.ascontiguousarray(getattr(self, column), dtype=dtype).view()
        values.flags.writeable = False
        object.__setattr__(self, column, values)

    def _check(self) -> None:
        if self.block_tokens < 1:
            raise InvalidInput(f"a block cannot have {self.block_tokens} tokens")
        per_request = (self.num_input, self.num_output, self.block_offsets[1:], self.tenant, self.priority)
        if any(column is not None and column.shape != self.arrival_s.shape for column in per_request):
            raise InvalidInput("the columns of a trace must be equally long (block_offsets by one longer)")
        if self.block_offsets[0] != 0 or self.block_offsets[-1] != len(self.block_ids):
            raise InvalidInput("block_offsets must go from 0 to the number of block ids")
        for wrong, problem in self._problems():
            if wrong.any():
                raise InvalidInput(f"request {int(wrong.argmax())} {problem}")

    def _problems(self) -> Iterator[tuple[NDArray[np.bool_], str]]:
        yield ~np.isfinite(self.arrival_s), "has no finite arrival time"
        yield np.diff(self.arrival_s, prepend=self.arrival_s[:1]) < 0, "arrives before the previous request"
        yield self.num_input < 1, "has no input tokens"
        yield self.num_output < 0, "has a negative number of output tokens"
        yield self.num_blocks != blocks_of(self.num_input, self.block_tokens), "has a wrong number of blocks"


def blocks_of(num_tokens: Ints, block_tokens: int) -> Ints:
    """Return the number of blocks for this many tokens, including a partial last block."""
    blocks: Ints = -(-num_tokens // block_tokens)
    return blocks


def offsets_of(counts: Ints) -> Ints:
    """Return where each group of `counts` entries begins, and where the last group ends."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _same(one: NDArray[Any] | None, other: NDArray[Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)
