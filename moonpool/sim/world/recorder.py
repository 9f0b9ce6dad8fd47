"""Looks at a simulated world at equal times while it runs, in bounded memory, and changes nothing in it.

When there would be too many samples, every second is forgotten and the time between them doubles. It lets the run end:
it looks no more once all requests have ended, or nothing else is to happen.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import InvalidInput
from moonpool.sim.world import gauges
from moonpool.sim.world.job import REFUSED, Job

SAMPLES_PER_TRACE = 200
_MAX_SAMPLES = 2 * SAMPLES_PER_TRACE
_SHORTEST_S = 1e-3

Columns = dict[str, list[float]]


class WorldRecorder:
    """Make it before the run, read `columns()` and `links()` after it."""

    def __init__(self, world: gauges.World, every_s: float | None = None) -> None:
        if every_s is None:
            every_s = max(world.trace.duration_s / SAMPLES_PER_TRACE, _SHORTEST_S)
        if not 0 < every_s < float("inf"):
            raise InvalidInput(f"a world cannot be looked at every {every_s} s")
        self.every_s = every_s
        self._world = world
        self._workers = gauges.workers_by_kind(world)
        self._blocks = gauges.blocks_by_rank(world.trace)
        self._open: list[Job] = []
        self._num_seen = 0  # of the world's jobs
        self._ended: Counter[int] = Counter()
        self._rows: list[dict[str, float]] = []
        world.clock.at(float(world.trace.arrival_s[0]) if len(world.trace) else 0.0, self._look)

    def columns(self) -> Columns:
        """One list per name, all equally long: gauges as they were at `time_s`, except `*_busy_share`, which is of
        the time since the sample before."""
        names = list(self._rows[0]) if self._rows else []
        found: Columns = {name: [row[name] for row in self._rows] for name in names}
        for kind, workers in self._workers.items():
            busy_s = found.pop(f"{kind}_busy_s", [])
            found[f"{kind}_busy_share"] = _shares(busy_s, found.get("time_s", []), len(workers))
        return found

    def links(self) -> tuple[float, Columns]:
        """(seconds per bucket, bytes per second over all links of a kind in each bucket), from time 0 on."""
        network, width_s = self._world.clock.network, 0.0
        sums: dict[str, NDArray[np.float64]] = {}
        for name in network.link_names:
            width_s, nbytes = network.nbytes_over_time(name)
            kind = name.rpartition("/")[2]
            sums[kind] = sums[kind] + nbytes if kind in sums else nbytes
        return width_s, {kind: (nbytes / width_s).tolist() for kind, nbytes in sums.items()}

    def _look(self) -> None:
        world = self._world
        self._count_jobs()
        self._rows.append(self._row())
        if len(self._rows) > _MAX_SAMPLES:
            self._rows = self._rows[::2]
            self.every_s *= 2
        has_all = self._num_seen == len(world.trace)
        if not (has_all and not self._open) and not world.clock.is_idle:
            world.clock.at(world.clock.now_s + self.every_s, self._look)

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
            found = gauges.read(workers, now_s)
            row[f"{kind}_waiting"], row[f"{kind}_running"] = found.waiting, found.running
            row[f"{kind}_mean_batch"], row[f"{kind}_largest_batch"] = found.running / len(workers), found.largest_batch
            row[f"{kind}_busy_s"] = found.busy_s
            preemptions += found.preemptions
        for tier, nbytes in gauges.pool_nbytes(world).items():
            row[f"pool_{tier}_nbytes"] = nbytes
        for rank, count in gauges.replicas(world, self._blocks).items():
            row[f"replicas_rank_{rank}"] = count
        row["ended"], row["refused"] = sum(self._ended.values()), self._ended[REFUSED]
        row["preemptions"] = preemptions
        return row


def _shares(busy_s: list[float], time_s: list[float], num_workers: int) -> list[float]:
    spent = np.diff(np.array(busy_s), prepend=0.0)
    lasted = np.diff(np.array(time_s), prepend=0.0) * num_workers
    shares = np.divide(spent, lasted, out=np.zeros_like(spent), where=lasted > 0)
    return np.clip(shares, 0.0, 1.0).tolist()  # type: ignore[no-any-return]
