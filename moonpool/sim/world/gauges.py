"""What can be read off a simulated world at one moment, without changing it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from moonpool.base.keys import object_key
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.coupled import CoupledCluster, CoupledWorker
from moonpool.sim.world.decode import DecodeWorker
from moonpool.sim.world.paper import block_key
from moonpool.sim.world.pool import SimPool
from moonpool.sim.world.prefill import PrefillWorker
from moonpool.store.messages import Tier
from moonpool.traces.columns import Trace

World: TypeAlias = SimCluster | CoupledCluster
Worker: TypeAlias = PrefillWorker | DecodeWorker | CoupledWorker
RANKS = (10, 100, 1000, 10_000)  # by use: the paper's Fig 11


class Gauge(NamedTuple):
    """Of all workers of a kind together. `waiting` is for pages or their turn, `running` in batches."""

    waiting: int
    running: int
    largest_batch: int
    busy_s: float  # since the start, the step under way included
    preemptions: int


def workers_by_kind(world: World) -> dict[str, list[Worker]]:
    if isinstance(world, CoupledCluster):
        return {"engine": list(world.workers)}
    return {"prefill": list(world.prefills.values()), "decode": list(world.decodes.values())}


def read(workers: Sequence[Worker], now_s: float) -> Gauge:
    rosters = [worker.scheduler.roster for worker in workers]
    running = [roster.num_running for roster in rosters]
    places = [worker.num_waiting for worker in workers if isinstance(worker, DecodeWorker)]
    return Gauge(
        waiting=sum(roster.num_waiting for roster in rosters) + sum(places),
        running=sum(running),
        largest_batch=max(running),
        busy_s=sum(worker.busy_until_s(now_s) for worker in workers),
        preemptions=sum(worker.scheduler.num_preemptions for worker in workers),
    )


def pool_nbytes(world: World) -> dict[str, int]:
    """Bytes used per tier, of all pools together."""
    used = {"dram": 0, "ssd": 0}
    for pool in _pools(world):
        for segment in pool.state.stats().segments:
            used["ssd" if segment.tier is Tier.SSD else "dram"] += segment.used_nbytes
    return used


def blocks_by_rank(trace: Trace, ranks: Iterable[int] = RANKS) -> dict[int, int]:
    """The blocks that are used by the 10th most, 100th most, ... prompts, as far as there are so many; among equals
    the smaller number first. A prompt's partial last block is never stored and does not count."""
    is_full = np.ones(len(trace.block_ids), dtype=np.bool_)
    is_full[trace.block_offsets[1:][trace.num_input % trace.block_tokens > 0] - 1] = False
    numbers, uses = np.unique(trace.block_ids[is_full], return_counts=True)
    order = np.argsort(-uses, kind="stable")
    return {rank: int(numbers[order[rank - 1]]) for rank in ranks if rank <= len(order)}


def replicas(world: World, blocks: Mapping[int, int]) -> dict[int, int]:
    """On how many nodes each block is: in the pages of those that prefill, in the pool's memory or on its disks."""
    return {rank: len(_holders(world, number)) for rank, number in blocks.items()}


def _holders(world: World, number: int) -> set[str]:
    key = block_key(number)
    if isinstance(world, CoupledCluster):
        return {str(at) for at, each in enumerate(world.workers) if each.scheduler.pages.page_of(key) is not None}
    nodes = {node for node, each in world.prefills.items() if each.scheduler.pages.page_of(key) is not None}
    name = object_key(block_key(world.runs.split([number])[0][0]))
    for pool in _pools(world):
        (info,) = pool.state.lookup([name], world.clock.now_s, lease=False)
        if info is not None:
            nodes |= {replica.segment.rpartition(".")[0] for replica in info.replicas}
    return nodes


def _pools(world: World) -> list[SimPool]:
    if isinstance(world, CoupledCluster):
        return []
    found: dict[int, SimPool] = {id(pool): pool for pool in world.pools.values() if pool is not None}
    return list(found.values())
