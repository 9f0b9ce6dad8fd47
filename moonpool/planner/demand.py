"""What a trace asks of the GPUs when a pool of some size is there: one row per request. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from moonpool.planner.hits import PoolSize, ReuseProfile, TierHits, tier_hits
from moonpool.sim.machine import Machine
from moonpool.sim.physics.hardware import NodeSpec
from moonpool.traces.columns import Floats, Ints


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class PrefillDemand:
    """Sorted by arrival. `prefill_s` is of one node alone, with what the pool has of the prompt."""

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
        """In which they come: one mean gap longer than from the first to the last."""
        count = len(self)
        between_s = float(self.arrival_s[-1] - self.arrival_s[0])
        return between_s * count / (count - 1) if count > 1 and between_s else 1.0

    @property
    def prefill_load(self) -> float:
        """Nodes that are kept busy by prefills, on average."""
        return float(self.prefill_s.sum()) / self.span_s

    @property
    def hit_share(self) -> float:
        return float((self.dram_tokens + self.ssd_tokens).sum() / self.num_input.sum())

    def rows(self, which: Ints, arrival_s: Floats | None = None) -> PrefillDemand:
        """These rows; with other arrivals, if given, in their order."""
        return PrefillDemand(
            arrival_s=self.arrival_s[which] if arrival_s is None else arrival_s,
            num_input=self.num_input[which],
            num_output=self.num_output[which],
            dram_tokens=self.dram_tokens[which],
            ssd_tokens=self.ssd_tokens[which],
            prefill_s=self.prefill_s[which],
        )

    def faster(self, factor: float) -> PrefillDemand:
        """The same requests in 1 / factor of the time."""
        return replace(self, arrival_s=self.arrival_s / factor)

    def busiest(self, count: int) -> PrefillDemand:
        """So many requests in a row, those that came in the least time; all, if there are no more."""
        if len(self) <= count:
            return self
        lasted_s = self.arrival_s[count - 1 :] - self.arrival_s[: len(self) - count + 1]
        first = int(lasted_s.argmin())
        return self.rows(np.arange(first, first + count))


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
    """Each prefill's time, and the hits that make it shortest: none, those in DRAM, or all. What is on SSD comes at
    its node's disks' pace, and nothing hides that."""
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
    """Bytes/s that a node's disks deliver together."""
    return node.num_ssds * node.ssd_read_bandwidth
