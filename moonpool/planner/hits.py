"""What a pool of each size finds of a trace, request by request, and the GPU time it saves. Pure.

One pass over the trace finds every block's reuse distance (traces/reuse.py); after that a pool of any size costs one
comparison of whole arrays. Two tiers are one LRU stack, cut in two: DRAM holds what was used last, SSD what comes
next, and no block is in both. So DRAM finds what it would alone, and SSD adds what both would as one, less that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.sim.physics.cost import PrefillCost
from moonpool.traces.columns import Floats, Ints, Trace
from moonpool.traces.reuse import NEVER, reuse_distances
from moonpool.traces.statistics import hit_tokens


class PoolSize(NamedTuple):
    """Of all nodes together, unless said otherwise."""

    dram_nbytes: float
    ssd_nbytes: float = 0.0

    def of_nodes(self, count: int) -> PoolSize:
        """Of so many nodes, where this is of one."""
        return PoolSize(self.dram_nbytes * count, self.ssd_nbytes * count)


@dataclass(frozen=True, eq=False, slots=True)
class ReuseProfile:
    """A trace and, for each of its blocks, the cache that it needs; `of` makes one."""

    trace: Trace
    distances: Ints  # in blocks; never falls within a request

    @classmethod
    def of(cls, trace: Trace) -> ReuseProfile:
        """InvalidInput for a trace without requests."""
        if not len(trace):
            raise InvalidInput(f"the trace {trace.name} has no requests")
        return cls(trace, reuse_distances(trace))

    def hits(self, capacity_tokens: float) -> Ints:
        """Tokens of each request that an LRU cache of that size has; partial blocks take the room of whole ones."""
        found = self.distances < self._num_blocks(capacity_tokens)
        return hit_tokens(self.trace, np.add.reduceat(found.astype(np.int64), self.trace.block_offsets[:-1]))

    def share(self, capacity_tokens: float) -> float:
        """The same of all tokens together."""
        return float(self.hits(capacity_tokens).sum() / self.trace.num_input.sum())

    def num_beyond(self, capacity_tokens: float) -> int:
        """Uses of blocks that a cache of that size does not hit."""
        return int((self.distances >= self._num_blocks(capacity_tokens)).sum())

    @property
    def num_blocks_written(self) -> int:
        """Different blocks: what a pool must hold to hit all that can be."""
        return len(np.unique(self.trace.block_ids))

    def _num_blocks(self, capacity_tokens: float) -> float:
        """That a cache holds. One without limit does not hold what never was."""
        return min(float(np.floor(capacity_tokens / self.trace.block_tokens)), float(NEVER))


class TierHits(NamedTuple):
    """Tokens of each request by where they are found."""

    dram: Ints
    ssd: Ints


def tier_hits(profile: ReuseProfile, size: PoolSize, kv_nbytes_per_token: int) -> TierHits:
    if size.dram_nbytes < 0 or size.ssd_nbytes < 0:
        raise InvalidInput(f"a pool cannot have {size.dram_nbytes:g} and {size.ssd_nbytes:g} bytes")
    dram = profile.hits(size.dram_nbytes / kv_nbytes_per_token)
    if not size.ssd_nbytes:
        return TierHits(dram, np.zeros_like(dram))
    both = profile.hits((size.dram_nbytes + size.ssd_nbytes) / kv_nbytes_per_token)
    return TierHits(dram, both - dram)


def saved_gpu_s(profile: ReuseProfile, cost: PrefillCost, capacity_tokens: float) -> Floats:
    """Per request: what its prefill takes from nothing, less what it takes with what the cache has. A request for
    which loading would take longer than computing saves nothing."""
    trace = profile.trace
    nothing = cost.prefills_s(trace.num_input, np.zeros_like(trace.num_input))
    saved: Floats = nothing - cost.prefills_s(trace.num_input, profile.hits(capacity_tokens))
    return np.maximum(saved, 0.0)
