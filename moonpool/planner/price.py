"""What a pool costs and what it saves, in money per month. Pure.

GPUs are counted in fractions of a node here, so that the curve is smooth: the nodes that prefills keep busy, times the
same room to spare as in the cluster that was sized in whole nodes, plus its decode nodes.

Disks wear out: whatever DRAM has no room for is written to SSD, and an SSD too small for so much writing is no choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moonpool.base.errors import InvalidInput
from moonpool.planner.demand import PoolSize, ReuseProfile, demand_of
from moonpool.planner.split import Estimate
from moonpool.sim.fleet import Machine

HOURS_PER_MONTH = 730.0
_DAY_S = 86_400.0
_GB = 1e9
_TB = 1e12
_FLAT = 1.05  # sizes whose total is within 5 % of the least
DRAM_TB = (0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)
SSD_TB = (0.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In one currency. The defaults are assumed, not anybody's offer: give your own."""

    gpu_hour: float = 2.0
    dram_gb_month: float = 2.0
    ssd_gb_month: float = 0.1
    ssd_writes_per_day: float = 3.0  # times its size that an SSD may be written a day
    source: str = "assumed"

    def __post_init__(self) -> None:
        for name in ("gpu_hour", "dram_gb_month", "ssd_gb_month", "ssd_writes_per_day"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidInput(f"{name} cannot be {getattr(self, name)}", param=name)


class PoolCost(msgspec.Struct, frozen=True, kw_only=True):
    """Per month."""

    dram_nbytes: float
    ssd_nbytes: float
    hit_share: float
    ssd_writes_per_day: float  # times its size
    nodes: float
    gpus: float  # money
    memory: float
    total: float


class CheapestPool(msgspec.Struct, frozen=True, kw_only=True):
    """`flat_dram_nbytes`: the least and the most DRAM, with the best SSD for each, that cost within 5 % of the best."""

    best: PoolCost
    without_pool: PoolCost
    if_disks_lasted: PoolCost  # the best where SSDs could be written without end
    by_dram: list[PoolCost]  # for each size of DRAM, the SSD that is cheapest with it
    flat_dram_nbytes: tuple[float, float]
    at_the_edge: bool  # the largest size looked at is the best: a larger one may be cheaper


def read_prices(text: bytes) -> Prices:
    """From JSON; InvalidInput says which field is wrong."""
    try:
        prices = msgspec.json.decode(text, type=Prices)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"these are no prices: {error}") from error
    return prices if prices.source != "assumed" else msgspec.structs.replace(prices, source="given")


def cheapest_pool(
    profile: ReuseProfile,
    machine: Machine,
    prices: Prices,
    sized: Estimate,
    dram_tb: Sequence[float] = DRAM_TB,
    ssd_tb: Sequence[float] = SSD_TB,
) -> CheapestPool:
    """`sized`: a cluster that meets the targets."""
    spare = 1 / sized.prefill_busy
    rows, tireless = [], []
    for dram in dram_tb:
        sizes = [PoolSize(dram * _TB, ssd * _TB) for ssd in ssd_tb if dram or not ssd]
        costs = [pool_cost(profile, size, machine, prices, spare, sized.num_decode) for size in sizes]
        tireless.append(_least(costs))
        rows.append(_least([cost for cost in costs if cost.ssd_writes_per_day <= prices.ssd_writes_per_day]))
    best = _least(rows)
    flat = [row.dram_nbytes for row in rows if row.total <= _FLAT * best.total]
    return CheapestPool(
        best=best,
        without_pool=pool_cost(profile, PoolSize(0.0), machine, prices, spare, sized.num_decode),
        if_disks_lasted=_least(tireless),
        by_dram=rows,
        flat_dram_nbytes=(min(flat), max(flat)),
        at_the_edge=best.dram_nbytes == max(dram_tb) * _TB,
    )


def pool_cost(
    profile: ReuseProfile, size: PoolSize, machine: Machine, prices: Prices, spare: float, num_decode: int
) -> PoolCost:
    demand = demand_of(profile, size, machine)
    nodes = demand.prefill_load * spare + num_decode
    gpus = nodes * machine.node.num_gpus * prices.gpu_hour * HOURS_PER_MONTH
    memory = (size.dram_nbytes * prices.dram_gb_month + size.ssd_nbytes * prices.ssd_gb_month) / _GB
    return PoolCost(
        dram_nbytes=size.dram_nbytes,
        ssd_nbytes=size.ssd_nbytes,
        hit_share=demand.hit_share,
        ssd_writes_per_day=_writes_per_day(profile, size, machine, demand.span_s),
        nodes=nodes,
        gpus=gpus,
        memory=memory,
        total=gpus + memory,
    )


def _least(costs: Sequence[PoolCost]) -> PoolCost:
    return min(costs, key=lambda cost: (cost.total, cost.dram_nbytes + cost.ssd_nbytes))


def _writes_per_day(profile: ReuseProfile, size: PoolSize, machine: Machine, span_s: float) -> float:
    """Each block that is not in DRAM when it is used comes into it and so pushes one out, to SSD."""
    if not size.ssd_nbytes:
        return 0.0
    block_nbytes = profile.trace.block_tokens * machine.shape.kv_nbytes_per_token
    pushed_out = profile.num_beyond(size.dram_nbytes / machine.shape.kv_nbytes_per_token)
    return pushed_out * block_nbytes / span_s * _DAY_S / size.ssd_nbytes
