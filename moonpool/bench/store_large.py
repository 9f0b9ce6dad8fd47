"""One master, many objects: memory, rates and the longest pause while it grows, evicts, journals and snapshots.

Objects are blocks without bytes, in chains of 100, as large as 320 tokens of LLaMA-70B: ten million are a petabyte. The
master has its own processor; a third client makes one small call every millisecond and records the longest wait.
Journal and snapshots are on, as by default; a snapshot's file shows when it is being written.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moonpool.bench.store_case import ClaimReport, StoreCase, say
from moonpool.bench.store_pool import NUM_CLIENTS, BenchClient, BenchPool, start_pool

BLOCK_NBYTES = 320 * 327_680 + 4096  # keys and values of 320 tokens, and a header
NUM_SEGMENTS = 64
FIRST_NUM_OBJECTS = 100_000
_FULL_PART = 0.93  # of the pool's bytes is taken when all objects are there; eviction starts at 0.95
_MAX_PAUSE_MS = 50.0
_MAX_GB = 8.0
_LEAST_RATE_RATIO = 0.5
_LOOK_EVERY_S = 0.02
_SETTLED_S = 0.5
_MAX_SNAPSHOT_S = 120.0
# The segments have no node, which would send heartbeats and copy hot keys; so both must never be due. Leases are short,
# so that a small run also has something to evict.
_LEASE_S = 0.5
_RULES = {"segment_ttl_s": 1e6, "away_ttl_s": 1e6, "hot_hits": 1_000_000_000, "lease_s": _LEASE_S}
RATES = (("exist_many", "exist"), ("lookup_many", "look-up"), ("store", "put_start + put_end"))


class Filler:
    """Fills the master with blocks without bytes, by the first two clients; `count` is how many there are."""

    def __init__(self, pool: BenchPool, *, nbytes: int, chained: bool) -> None:
        self._pool, self._nbytes, self._chained = pool, nbytes, chained
        self.count = 0

    def grow(self, count: int) -> float:
        """Put `count` more objects, by both clients in parallel; return objects/s."""
        share = count // NUM_CLIENTS
        shares = [{"first": self.count + number * share} for number in range(NUM_CLIENTS)]
        self.count += NUM_CLIENTS * share
        return self._pool.run_on_all("store", shares, count=share, nbytes=self._nbytes, chained=self._chained)

    def rate(self, what: str, seconds: float) -> float:
        """Return keys/s, the sum of both clients."""
        return self._pool.run_on_all(what, first=0, count=self.count, seconds=seconds)


class SnapshotWatch:
    """Records when snapshots were being written, by their files in the master's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="snapshots")
        self.times_s: list[tuple[float, float]] = []  # from, to

    def __enter__(self) -> SnapshotWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def worst_s(self, long: list[tuple[float, float]]) -> float:
        """Return the longest wait that overlaps with a snapshot."""
        return max(
            (
                lasted
                for begun, lasted in long
                for start, end in self.times_s
                if begun <= end and begun + lasted >= start
            ),
            default=0.0,
        )

    def wait_until_over(self) -> None:
        """Wait until no snapshot is being written, at most _MAX_SNAPSHOT_S."""
        ends_s = time.monotonic() + _MAX_SNAPSHOT_S
        while self._is_written() and time.monotonic() < ends_s:
            time.sleep(_LOOK_EVERY_S)

    def _is_written(self) -> bool:
        return any(self._folder.glob("snapshot-*.new"))

    def _watch(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            if self._is_written():
                now_s = time.monotonic()
                if self.times_s and now_s - self.times_s[-1][1] < 3 * _LOOK_EVERY_S:
                    self.times_s[-1] = (self.times_s[-1][0], now_s)
                else:
                    self.times_s.append((now_s - _LOOK_EVERY_S, now_s))


def measure(report: ClaimReport, num_objects: int, seconds: float) -> None:
    """Start a master, fill it with `num_objects`, then with more until it evicts; report the figures."""
    first = min(FIRST_NUM_OBJECTS, num_objects // 10)
    segment_nbytes = int((num_objects + first) * BLOCK_NBYTES / _FULL_PART / NUM_SEGMENTS)
    with start_pool(master=_RULES, num_clients=NUM_CLIENTS + 1, apart=True) as pool:
        pinger = pool.clients[NUM_CLIENTS]
        pool.clients[0].do("mount", count=NUM_SEGMENTS, nbytes=segment_nbytes)
        filler = Filler(pool, nbytes=BLOCK_NBYTES, chained=True)
        filler.grow(first)
        before = _rates(filler, first, seconds)
        with _pings(pinger), SnapshotWatch(pool.data_dir) as snapshots:
            _measure_growing(report, pool, filler, pinger, snapshots, num_objects - 2 * first)
            snapshots.wait_until_over()  # so that the rates are measured without one
            after = _rates(filler, first, seconds)
            _measure_evicting(report, filler, pinger, num_objects // 20)
        for what, name in RATES:
            case = f"{name} in batches at {num_objects:,} objects (beside: at {first:,})"
            report.add(StoreCase(case, "keys/s", float, None, _LEAST_RATE_RATIO), after[what], before[what])


def _rates(filler: Filler, count: int, seconds: float) -> dict[str, float]:
    """Keys/s at the present size."""
    rates = {what: filler.rate(what, seconds) for what, _ in RATES if what != "store"}
    return {**rates, "store": filler.grow(count)}


def _measure_growing(
    report: ClaimReport, pool: BenchPool, filler: Filler, pinger: BenchClient, snapshots: SnapshotWatch, count: int
) -> None:
    quiet = pinger.do("pings")
    waited_s = _run_delay_s(pool.master_pid)
    rate = filler.grow(count)
    pings = pinger.do("pings")
    report.add_figure(f"growing to {filler.count:,} objects", rate, "objects/s")
    report.add_figure(
        f"memory of the master at {filler.count:,} objects", _rss_gb(pool.master_pid), "GB", at_most=_MAX_GB
    )
    report.add_figure("longest wait when nothing goes on", quiet["worst_s"] * 1e3, "ms")
    report.add_figure("longest wait while growing, journal on", pings["worst_s"] * 1e3, "ms", at_most=_MAX_PAUSE_MS)
    if snapshots.times_s:
        worst_ms = snapshots.worst_s(pings["long"]) * 1e3
        report.add_figure("snapshots", len(snapshots.times_s), "files")
        report.add_figure("longest wait during snapshots", worst_ms, "ms", at_most=_MAX_PAUSE_MS)
    else:
        say("no snapshot was due while growing; their pauses are not measured (more --objects)")
    waited_s = _run_delay_s(pool.master_pid) - waited_s
    report.add_figure("time the master waited for its processor meanwhile", waited_s, "s", compared=False)


def _measure_evicting(report: ClaimReport, filler: Filler, pinger: BenchClient, count: int) -> None:
    """Put objects until the watermark is crossed, and further, so that earlier objects are evicted."""
    time.sleep(2 * _LEASE_S)  # until all leases have ended
    pinger.do("pings")
    rate = filler.grow(count)
    evicted = _when_settled(lambda: int(pinger.do("stats")["evicted"]))
    pings = pinger.do("pings")
    if not evicted:
        say("nothing was evicted; the pauses of eviction are not measured")
        return
    report.add_figure("putting while evicting", rate, "objects/s")
    report.add_figure("objects evicted", evicted, "objects")
    report.add_figure("longest wait while evicting", pings["worst_s"] * 1e3, "ms", at_most=_MAX_PAUSE_MS)


def _when_settled(ask: Callable[[], int]) -> int:
    """Return the number once it stops changing."""
    before, now = -1, ask()
    while now != before:
        time.sleep(_SETTLED_S)
        before, now = now, ask()
    return now


@contextlib.contextmanager
def _pings(pinger: BenchClient) -> Iterator[None]:
    pinger.do("ping")
    time.sleep(1.0)  # without other load, to measure the wait then
    yield


def _rss_gb(pid: int) -> float:
    return int(_proc(pid, "status").split("VmRSS:")[1].split()[0]) * 1024 / 1e9


def _run_delay_s(pid: int) -> float:
    """Return how long the process was runnable but not running; 0 if the kernel does not count it."""
    with contextlib.suppress(OSError):
        return int(_proc(pid, "schedstat").split()[1]) / 1e9
    return 0.0


def _proc(pid: int, name: str) -> Any:
    return Path(f"/proc/{pid}/{name}").read_text()
