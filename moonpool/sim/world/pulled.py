"""What simulated workers pull of a prompt: which blocks the pool has, where they are, and what a pull measures."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.base.cluster import PullSample
from moonpool.sim.world.job import Job
from moonpool.sim.world.pool import PoolHit, SimPool, Sources, only_source


def find_prefix(pool: SimPool | None, job: Job, num_reusable: int, node: str) -> tuple[PoolHit, int]:
    """Look up and lease the job's leading blocks, for a worker on `node`. Return where they are, and how many may be
    pulled: `num_reusable` at most, and no more than the conductor allows."""
    limit = num_reusable if job.max_pool_blocks is None else min(num_reusable, job.max_pool_blocks)
    if pool is None or not limit:
        return PoolHit([], [], []), 0
    found = pool.find([run for run in job.runs if run[1] < limit], node)
    return found, min(found.num_blocks, limit)


def count_sources(job: Job, nodes: Sequence[str], block_tokens: int, *sources: Sources) -> None:
    """Record where the job's reused tokens come from; `nodes` are those of its worker."""
    job.dram_tokens = job.remote_tokens = job.ssd_tokens = 0
    for (source, on_ssd), count in [item for each in sources for item in each.items()]:
        num_tokens = count * block_tokens
        if on_ssd:
            job.ssd_tokens += num_tokens
        elif source in nodes:
            job.dram_tokens += num_tokens
        else:
            job.remote_tokens += num_tokens


def pull_sample(sources: Sources, block_nbytes: float, seconds: float, nodes: Sequence[str]) -> PullSample:
    """Return what a worker on `nodes` reports of a pull of `block_nbytes` per block."""
    node, num_on_ssd = only_source(sources), sum([count for (_, on_ssd), count in sources.items() if on_ssd])
    nbytes, ssd_nbytes = int(sum(sources.values()) * block_nbytes), int(num_on_ssd * block_nbytes)
    return PullSample(nbytes, seconds, ssd_nbytes, node, node in nodes)
