"""Blocks that always come together are one object of the simulated pool: a run.

A block and the one behind it are in the same run when every prompt that has one has both. So a prompt uses a run whole
(but for its last block, of which a token is always computed), and looking for runs finds what looking for blocks would.
What differs: a run is evicted whole, while a real pool may keep the first of its blocks. `max_blocks` bounds that; with
1 nothing differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.sim.world.paper import block_number
from moonpool.traces.columns import Trace

Ints = NDArray[np.int64]


class BlockRuns:
    """Of a trace's full blocks: partial ones are never stored."""

    def __init__(self, trace: Trace, max_blocks: int) -> None:
        ids, is_first = _full_blocks(trace)
        size = int(ids.max()) + 1 if len(ids) else 0
        counts = np.bincount(ids, minlength=size)
        begins = is_first.copy()
        begins[1:] |= counts[ids[1:]] != counts[ids[:-1]]
        positions = np.arange(len(ids))
        begins |= (positions - np.maximum.accumulate(np.where(begins, positions, 0))) % max_blocks == 0
        starts = np.maximum.accumulate(np.where(begins, positions, 0))
        heads = np.zeros(size, dtype=np.int64)
        heads[ids] = ids[starts]
        lengths = np.zeros(size, dtype=np.int64)
        np.maximum.at(lengths, ids[starts], positions - starts + 1)
        places = np.zeros(size, dtype=np.int64)
        places[ids[begins]] = positions[begins]
        self._ids, self._places = ids, places
        self._heads: list[int] = heads.tolist()
        self._lengths: list[int] = lengths.tolist()

    def split(self, numbers: list[int]) -> list[tuple[int, int, int]]:
        """(first block, begin, end) of the runs of a prompt's leading blocks, with their places in the prompt."""
        found, begin, end = [], 0, len(numbers)
        heads, lengths = self._heads, self._lengths
        while begin < end:
            head = heads[numbers[begin]]
            stop = min(begin + lengths[head], end)
            found.append((head, begin, stop))
            begin = stop
        return found

    def blocks(self, name: bytes) -> list[int]:
        """The blocks of a run, by the pool's key of the first."""
        head = block_number(name)
        place = self._places.item(head)
        numbers: list[int] = self._ids[place : place + self._lengths[head]].tolist()
        return numbers

    def blocks_of_all(self, names: Sequence[bytes]) -> list[int]:
        return self.blocks(names[0]) if len(names) == 1 else [number for name in names for number in self.blocks(name)]


def _full_blocks(trace: Trace) -> tuple[Ints, NDArray[np.bool_]]:
    """All prompts' full blocks one after the other, and which of them are a prompt's first."""
    num_full = trace.num_input // trace.block_tokens
    offsets = trace.block_offsets
    ends = offsets[:-1] + num_full
    keep = np.zeros(len(trace.block_ids) + 1, dtype=np.int64)
    np.add.at(keep, offsets[:-1], 1)
    np.add.at(keep, ends, -1)
    mask = np.cumsum(keep[:-1]) > 0
    is_first = np.zeros(len(trace.block_ids), dtype=np.bool_)
    is_first[offsets[:-1][num_full > 0]] = True
    return trace.block_ids[mask], is_first[mask]
