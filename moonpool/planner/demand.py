"""What a pool of each size finds of a trace, request by request, and the GPU time that is left to spend. Pure.

One pass over the trace computes the reuse distance of every block (traces/reuse.py); after that, a pool of any size
costs one comparison of whole arrays. The two tiers are one LRU stack cut in two: DRAM holds the blocks used last, SSD
the next ones, and no block is in both. So DRAM hits as many blocks as it would alone, and SSD adds the hits of both as
one cache minus those of DRAM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.sim.fleet import Machine
from moonpool.sim.physics.cost import PrefillCost
from moonpool.sim.physics.hardware import NodeSpec
from moonpool.traces.columns import Floats, Ints, Trace
from moonpool.traces.reuse import NEVER, reuse_distances
from moonpool.traces.statistics import hit_tokens


class PoolSize(NamedTuple):
    """The bytes of a pool, of all nodes together unless stated otherwise."""

    dram_nbytes: float
    ssd_nbytes: float = 0.0

    def of_nodes(self, count: int) -> PoolSize:
        """Return the size for `count` nodes, if this is the size of one."""
        return PoolSize(self.dram_nbytes * count, self.ssd_nbytes * count)


@dataclass(frozen=True, eq=False, slots=True)
class ReuseProfile:
    """A trace, and for each of its blocks the cache size that it needs for a hit."""

    trace: Trace
    distances: Ints  # in blocks; never decreases within a request

    @classmethod
    def of(cls, trace: Trace) -> ReuseProfile:
        """Compute the profile. Raise InvalidInput for a trace without requests."""
        if not len(trace):
            raise InvalidInput(f"the trace {trace.name} has no requests")
        return cls(trace, reuse_distances(trace))

    def hits(self, capacity_tokens: float) -> Ints:
        """Return the tokens of each request that an LRU cache of this size hits. Partial blocks count as whole ones."""
        found = self.distances < self._num_blocks(capacity_tokens)
        return hit_tokens(self.trace, np.add.reduceat(found.astype(np.int64), self.trace.block_offsets[:-1]))

    def share(self, capacity_tokens: float) -> float:
        """Return the share of all input tokens that such a cache hits."""
        return float(self.hits(capacity_tokens).sum() / self.trace.num_input.sum())

    def num_beyond(self, capacity_tokens: float) -> int:
        """Return the number of block uses that such a cache misses."""
        return int((self.distances >= self._num_blocks(capacity_tokens)).sum())

    @property
    def num_blocks_written(self) -> int:
        """Return the number of distinct blocks, which a pool must hold for the highest hit rate."""
        return len(np.unique(self.trace.block_ids))

    def _num_blocks(self, capacity_tokens: float) -> float:
        """Return the blocks of a cache. Even an unlimited cache misses first uses."""
        return min(float(np.floor(capacity_tokens / self.trace.block_tokens)), float(NEVER))


class TierHits(NamedTuple):
    """Hit tokens of each request by tier."""

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
    """Return the prefill time that the cache saves per request; 0 if loading takes longer than computing."""
    trace = profile.trace
    nothing = cost.prefills_s(trace.num_input, np.zeros_like(trace.num_input))
    saved: Floats = nothing - cost.prefills_s(trace.num_input, profile.hits(capacity_tokens))
    return np.maximum(saved, 0.0)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class PrefillDemand:
    """What a trace asks of the GPUs, one row per request, sorted by arrival.

    `prefill_s` is the time on one node alone, with the hits of the pool.
    """

    arrival_s: Floats
    num_input: Ints
    num_output: Ints
    dram_tokens: Ints
    ssd_tokens: Ints
    prefill_s: Floats

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        """Return the time of the arrivals: one mean gap more than from the first to the last."""
        count = len(self)
        between_s = float(self.arrival_s[-1] - self.arrival_s[0])
        return between_s * count / (count - 1) if count > 1 and between_s else 1.0

    @property
    def prefill_load(self) -> float:
        """Return the number of nodes that prefills keep busy on average."""
        return float(self.prefill_s.sum()) / self.span_s

    @property
    def hit_share(self) -> float:
        return float((self.dram_tokens + self.ssd_tokens).sum() / self.num_input.sum())

    def rows(self, which: Ints, arrival_s: Floats | None = None) -> PrefillDemand:
        """Return these rows, with new arrivals if given."""
        return PrefillDemand(
            arrival_s=self.arrival_s[which] if arrival_s is None else arrival_s,
            num_input=self.num_input[which],
            num_output=self.num_output[which],
            dram_tokens=self.dram_tokens[which],
            ssd_tokens=self.ssd_tokens[which],
            prefill_s=self.prefill_s[which],
        )

    def faster(self, factor: float) -> PrefillDemand:
        """Return the same requests in 1 / factor of the time."""
        return replace(self, arrival_s=self.arrival_s / factor)

    def busiest(self, count: int) -> PrefillDemand:
        """Return the `count` successive requests that arrived in the shortest time; all, if there are fewer."""
        if len(self) <= count:
            return self
        first = busiest_row(self.arrival_s, count)
        return self.rows(np.arange(first, first + count))


def busiest_row(arrival_s: Floats, count: int) -> int:
    """Return the first of the `count` successive rows that arrived in the shortest time."""
    lasted_s = arrival_s[count - 1 :] - arrival_s[: len(arrival_s) - count + 1]
    return int(lasted_s.argmin())


def demand_of(profile: ReuseProfile, size: PoolSize, machine: Machine) -> PrefillDemand:
    trace = profile.trace
    found = tier_hits(profile, size, machine.shape.kv_nbytes_per_token)
    seconds, used = prefill_times(machine, trace.num_input, found)
    return PrefillDemand(
        arrival_s=trace.arrival_s,
        num_input=trace.num_input,
        num_output=trace.num_output,
        dram_tokens=used.dram,
        ssd_tokens=used.ssd,
        prefill_s=seconds,
    )


def prefill_times(machine: Machine, num_input: Ints, found: TierHits) -> tuple[Floats, TierHits]:
    """Return the time of each prefill, and the hits that make it shortest: none, those in DRAM, or all.

    SSD hits are read at the rate of one node's disks, without overlap.
    """
    cost = machine.cost.prefill
    zero = np.zeros_like(found.dram)
    ssd_s = found.ssd * (machine.shape.kv_nbytes_per_token / ssd_bandwidth(machine.node))
    choices = np.stack(
        [
            cost.prefills_s(num_input, zero),
            cost.prefills_s(num_input, found.dram),
            cost.prefills_s(num_input, found.dram + found.ssd) + ssd_s,
        ]
    )
    best = choices.argmin(axis=0)
    used = TierHits(np.where(best >= 1, found.dram, zero), np.where(best == 2, found.ssd, zero))
    return choices.min(axis=0), used


def ssd_bandwidth(node: NodeSpec) -> float:
    """Return the bytes/s that a node's disks deliver together."""
    return node.num_ssds * node.ssd_read_bandwidth
