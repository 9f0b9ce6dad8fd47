"""What a pool costs and saves, in money per month. Pure.

GPUs are counted in fractions of a node, so that the curve is smooth: the nodes that prefills keep busy, with the same
reserve as in the cluster that was sized in whole nodes, plus its decode nodes.

SSDs wear out: all that DRAM has no room for is written to SSD, and an SSD too small for this amount is not considered.
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
    """Prices in one currency. The defaults are assumptions, not offers: give your own."""

    gpu_hour: float = 2.0
    dram_gb_month: float = 2.0
    ssd_gb_month: float = 0.1
    ssd_writes_per_day: float = 3.0  # full writes per day that an SSD endures
    source: str = "assumed"

    def __post_init__(self) -> None:
        for name in ("gpu_hour", "dram_gb_month", "ssd_gb_month", "ssd_writes_per_day"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidInput(f"{name} cannot be {getattr(self, name)}", param=name)


class PoolCost(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one pool size per month."""

    dram_nbytes: float
    ssd_nbytes: float
    hit_share: float
    ssd_writes_per_day: float  # full writes of the SSD
    nodes: float
    gpus: float  # money
    memory: float
    total: float


class CheapestPool(msgspec.Struct, frozen=True, kw_only=True):
    """`flat_dram_nbytes`: the least and the most DRAM, with the best SSD for each, that cost within 5 % of the best."""

    best: PoolCost
    without_pool: PoolCost
    if_disks_lasted: PoolCost  # the best if SSDs did not wear out
    by_dram: list[PoolCost]  # for each size of DRAM, the SSD that is cheapest with it
    flat_dram_nbytes: tuple[float, float]
    at_the_edge: bool  # the largest size considered is the best: a larger one may be cheaper


def read_prices(text: bytes) -> Prices:
    """Read prices from JSON. Raise InvalidInput with the field that is wrong."""
    try:
        prices = msgspec.json.decode(text, type=Prices)
    except msgspec.DecodeError as error:
        raise InvalidInput(f"invalid prices: {error}") from error
    return prices if prices.source != "assumed" else msgspec.structs.replace(prices, source="given")


def cheapest_pool(profile: ReuseProfile, machine: Machine, prices: Prices, sized: Estimate) -> CheapestPool:
    """Return the cheapest pool for `sized`, a cluster that meets the targets."""
    spare = 1 / sized.prefill_busy
    rows, without_wear = [], []
    for dram in DRAM_TB:
        sizes = [PoolSize(dram * _TB, ssd * _TB) for ssd in SSD_TB if dram or not ssd]
        costs = [pool_cost(profile, size, machine, prices, spare, sized.num_decode) for size in sizes]
        without_wear.append(_cheapest(costs))
        rows.append(_cheapest([cost for cost in costs if cost.ssd_writes_per_day <= prices.ssd_writes_per_day]))
    best = _cheapest(rows)
    flat = [row.dram_nbytes for row in rows if row.total <= _FLAT * best.total]
    return CheapestPool(
        best=best,
        without_pool=pool_cost(profile, PoolSize(0.0), machine, prices, spare, sized.num_decode),
        if_disks_lasted=_cheapest(without_wear),
        by_dram=rows,
        flat_dram_nbytes=(min(flat), max(flat)),
        at_the_edge=best.dram_nbytes == max(DRAM_TB) * _TB,
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


def _cheapest(costs: Sequence[PoolCost]) -> PoolCost:
    return min(costs, key=lambda cost: (cost.total, cost.dram_nbytes + cost.ssd_nbytes))


def _writes_per_day(profile: ReuseProfile, size: PoolSize, machine: Machine, span_s: float) -> float:
    """Return the full writes of the SSD per day: each miss in DRAM moves one block from DRAM to SSD."""
    if not size.ssd_nbytes:
        return 0.0
    block_nbytes = profile.trace.block_tokens * machine.shape.kv_nbytes_per_token
    pushed_out = profile.num_beyond(size.dram_nbytes / machine.shape.kv_nbytes_per_token)
    return pushed_out * block_nbytes / span_s * _DAY_S / size.ssd_nbytes
