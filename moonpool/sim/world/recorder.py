"""Samples a simulated cluster at equal intervals while it runs, in bounded memory, without changing it.

When there are too many samples, every second one is dropped and the interval doubles. The recorder lets the run end: it
takes no further sample once all requests have ended or no other event is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import InvalidInput
from moonpool.base.keys import object_key
from moonpool.sim.world.cluster import SimCluster
from moonpool.sim.world.coupled import CoupledCluster, CoupledWorker
from moonpool.sim.world.decode import DecodeWorker
from moonpool.sim.world.job import REFUSED, Job
from moonpool.sim.world.pool import SimPool
from moonpool.sim.world.prefill import PrefillWorker
from moonpool.sim.world.sequence import block_key
from moonpool.store.messages import Tier
from moonpool.traces.columns import Trace

World: TypeAlias = SimCluster | CoupledCluster
Worker: TypeAlias = PrefillWorker | DecodeWorker | CoupledWorker
RANKS = (10, 100, 1000, 10_000)  # ranks by number of uses, as in the paper's Fig 11


class Gauge(NamedTuple):
    """All workers of a kind together. `waiting` requests wait for pages or in a queue, `running` ones are batched."""

    waiting: int
    running: int
    largest_batch: int
    busy_s: float  # since the start, including the step under way
    preemptions: int


def workers_by_kind(world: World) -> dict[str, list[Worker]]:
    if isinstance(world, CoupledCluster):
        return {"engine": list(world.workers)}
    return {"prefill": list(world.prefills.values()), "decode": list(world.decodes.values())}


def read_gauge(workers: Sequence[Worker], now_s: float) -> Gauge:
    all_queues = [worker.scheduler.queues for worker in workers]
    running = [queues.num_running for queues in all_queues]
    places = [worker.num_waiting for worker in workers if isinstance(worker, DecodeWorker)]
    return Gauge(
        waiting=sum(queues.num_waiting for queues in all_queues) + sum(places),
        running=sum(running),
        largest_batch=max(running),
        busy_s=sum(worker.busy_until_s(now_s) for worker in workers),
        preemptions=sum(worker.scheduler.num_preemptions for worker in workers),
    )


def pool_nbytes(world: World) -> dict[str, int]:
    """Return the bytes used per tier, all pools together."""
    used = {"dram": 0, "ssd": 0}
    for pool in _pools(world):
        for segment in pool.state.stats().segments:
            used["ssd" if segment.tier is Tier.SSD else "dram"] += segment.used_nbytes
    return used


def blocks_by_rank(trace: Trace, ranks: Iterable[int] = RANKS) -> dict[int, int]:
    """Return the blocks that the 10th most, 100th most, ... prompts use, as far as the trace has that many blocks.

    Of blocks with the same use the smaller number comes first. Partial last blocks are never stored and do not count.
    """
    is_full = np.ones(len(trace.block_ids), dtype=np.bool_)
    is_full[trace.block_offsets[1:][trace.num_input % trace.block_tokens > 0] - 1] = False
    numbers, uses = np.unique(trace.block_ids[is_full], return_counts=True)
    order = np.argsort(-uses, kind="stable")
    return {rank: int(numbers[order[rank - 1]]) for rank in ranks if rank <= len(order)}


def replicas(world: World, blocks: Mapping[int, int]) -> dict[int, int]:
    """Return the number of nodes that hold each block: in pages of prefill workers, in the pool's memory or on SSD."""
    return {rank: len(_nodes_with(world, number)) for rank, number in blocks.items()}


def _nodes_with(world: World, number: int) -> set[str]:
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


SAMPLES_PER_TRACE = 200
_MAX_SAMPLES = 2 * SAMPLES_PER_TRACE
_SHORTEST_S = 1e-3

Columns = dict[str, list[float]]


class WorldRecorder:
    """Create it before the run; read `columns()` and `links()` after the run."""

    def __init__(self, world: World, every_s: float | None = None) -> None:
        if every_s is None:
            every_s = max(world.trace.duration_s / SAMPLES_PER_TRACE, _SHORTEST_S)
        if not 0 < every_s < float("inf"):
            raise InvalidInput(f"a cluster cannot be sampled every {every_s} s")
        self.every_s = every_s
        self._world = world
        self._workers = workers_by_kind(world)
        self._blocks = blocks_by_rank(world.trace)
        self._open: list[Job] = []
        self._num_seen = 0  # of the world's jobs
        self._ended: Counter[int] = Counter()
        self._rows: list[dict[str, float]] = []
        world.clock.call_at(float(world.trace.arrival_s[0]) if len(world.trace) else 0.0, self._sample)

    def columns(self) -> Columns:
        """Return one list per name, all of the same length: gauges at `time_s`; `*_busy_share` is of the time since the
        previous sample."""
        names = list(self._rows[0]) if self._rows else []
        found: Columns = {name: [row[name] for row in self._rows] for name in names}
        for kind, workers in self._workers.items():
            busy_s = found.pop(f"{kind}_busy_s", [])
            found[f"{kind}_busy_share"] = _shares(busy_s, found.get("time_s", []), len(workers))
        return found

    def links(self) -> tuple[float, Columns]:
        """Return the seconds per bucket, and per kind of link the bytes per second in each bucket, from time 0."""
        network, width_s = self._world.clock.network, 0.0
        sums: dict[str, NDArray[np.float64]] = {}
        for name in network.link_names:
            width_s, nbytes = network.nbytes_over_time(name)
            kind = name.rpartition("/")[2]
            sums[kind] = sums[kind] + nbytes if kind in sums else nbytes
        return width_s, {kind: (nbytes / width_s).tolist() for kind, nbytes in sums.items()}

    def _sample(self) -> None:
        world = self._world
        self._count_jobs()
        self._rows.append(self._row())
        if len(self._rows) > _MAX_SAMPLES:
            self._rows = self._rows[::2]
            self.every_s *= 2
        has_all = self._num_seen == len(world.trace)
        if not (has_all and not self._open) and not world.clock.is_idle:
            world.clock.call_at(world.clock.now_s + self.every_s, self._sample)

    def _count_jobs(self) -> None:
        jobs = self._world.jobs
        self._open += islice(jobs, self._num_seen, None)
        self._num_seen = len(jobs)
        self._ended.update(job.outcome for job in self._open if job.outcome)
        self._open = [job for job in self._open if not job.outcome]

    def _row(self) -> dict[str, float]:
        world, now_s = self._world, self._world.clock.now_s
        row: dict[str, float] = {"time_s": now_s, "open": len(self._open)}
        preemptions = 0
        for kind, workers in self._workers.items():
            found = read_gauge(workers, now_s)
            row[f"{kind}_waiting"], row[f"{kind}_running"] = found.waiting, found.running
            row[f"{kind}_mean_batch"], row[f"{kind}_largest_batch"] = found.running / len(workers), found.largest_batch
            row[f"{kind}_busy_s"] = found.busy_s
            preemptions += found.preemptions
        for tier, nbytes in pool_nbytes(world).items():
            row[f"pool_{tier}_nbytes"] = nbytes
        for rank, count in replicas(world, self._blocks).items():
            row[f"replicas_rank_{rank}"] = count
        row["ended"], row["refused"] = sum(self._ended.values()), self._ended[REFUSED]
        row["preemptions"] = preemptions
        return row


def _shares(busy_s: list[float], time_s: list[float], num_workers: int) -> list[float]:
    spent = np.diff(np.array(busy_s), prepend=0.0)
    lasted = np.diff(np.array(time_s), prepend=0.0) * num_workers
    shares = np.divide(spent, lasted, out=np.zeros_like(spent), where=lasted > 0)
    return np.clip(shares, 0.0, 1.0).tolist()  # type: ignore[no-any-return]
