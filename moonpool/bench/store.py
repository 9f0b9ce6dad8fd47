"""What `moonpool bench store` and benchmarks/store.py measure: a master, a node and two clients, as processes.

Every figure is shown with a baseline of the same run, measured alternately: a loop that copies and checksums the same
bytes, iperf3, redis, fio, or a claim where nothing is comparable. Checksums are always on. The first line shows the
load of the machine: if others use it, the ratios mean little. Missed claims are listed at the end, on standard error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from moonpool.base.errors import InvalidInput
from moonpool.bench import store_large, store_redis, store_ssd
from moonpool.bench.bare_sockets import bare_gb_s
from moonpool.bench.iperf import iperf_gb_s
from moonpool.bench.report import BenchReport
from moonpool.bench.store_calls import BATCH
from moonpool.bench.store_case import BenchScale, ClaimReport, StoreCase, say
from moonpool.bench.store_large import Filler
from moonpool.bench.store_objects import MIB, SMALL_BATCH, SMALL_NBYTES
from moonpool.bench.store_pool import NUM_CLIENTS, BenchPool, start_pool

LARGE_NUM_OBJECTS = 10_000_000
_LABEL = "kept"
_EXIST_PER_S, _EXIST_KEYS_PER_S, _STORED_PER_S = 15_000.0, 1_500_000.0, 150_000.0
_SMALL_GETS_PER_S, _SMALL_PUTS_PER_S, _VIEW_US, _REDIS_RATIO = 100_000.0, 60_000.0, 80.0, 4.0
_PAPER_NBYTES = 1 << 50
_SPARE_NBYTES = 64 * MIB


class Options(NamedTuple):
    scale: BenchScale
    num_objects: int  # to grow to
    folder: str | None  # on the disk to measure


def run(
    figures: BenchReport,
    *,
    cases: Sequence[str] = (),
    quick: bool = False,
    rounds: int | None = None,
    num_objects: int | None = None,
    large: bool = False,
    folder: str | None = None,
) -> None:
    """Report one figure per case. Without `cases`, all run. Raise InvalidInput for an unknown case."""
    unknown = set(cases) - CASES.keys()
    if unknown:
        raise InvalidInput(f"there is no case {', '.join(sorted(unknown))}; the cases are {', '.join(CASES)}")
    scale = BenchScale.quick() if quick else BenchScale()
    if rounds is not None:
        scale = replace(scale, rounds=rounds)
    options = Options(scale, num_objects or (LARGE_NUM_OBJECTS if large else scale.num_objects), folder)
    report = ClaimReport(figures)
    report.add_figure("machine's load before", os.getloadavg()[0], "cores")
    for name in cases or CASES:
        CASES[name](report, options)
    report.print_missed()


def _copy(report: ClaimReport, options: Options) -> None:
    """1 MiB within this machine."""
    scale = options.scale
    count, seconds = scale.num_large, scale.seconds
    with _large_pool(scale) as pool:
        writer, reader = pool.clients
        for batch, how, get_claim, put_claim in (
            (True, f"batches of {count}", 0.9, 0.8),
            (False, "one by one", 0.7, 0.6),
        ):
            get = partial(reader.do, "get", way="shm", label=_LABEL, count=count, batch=batch, seconds=seconds)
            loop = partial(reader.do, "copy_out", label=_LABEL, count=count, seconds=seconds)
            report.measure(
                StoreCase(f"get 1 MiB, {how} (beside: copy and crc32c)", "GB/s", get, loop, get_claim), scale.rounds
            )
            put = partial(writer.do, "put", way="shm", count=count, batch=batch, seconds=seconds)
            loop = partial(writer.do, "copy_in", count=count, seconds=seconds)
            report.measure(
                StoreCase(f"put 1 MiB, {how} (beside: crc32c and copy)", "GB/s", put, loop, put_claim), scale.rounds
            )


def _view(report: ClaimReport, options: Options) -> None:
    scale = options.scale
    with _large_pool(scale) as pool:
        reader = pool.clients[1]
        view = partial(reader.do, "view_us", label=_LABEL, count=scale.num_large, seconds=scale.seconds)
        case = StoreCase("view of 1 MiB", "us", partial(view, always=False), _VIEW_US, 1.0, smaller_is_better=True)
        report.measure(case, scale.rounds)
        first = partial(reader.do, "first_view_us", label=_LABEL, count=scale.num_large, seconds=scale.seconds)
        case = StoreCase("view of 1 MiB, not viewed in the last second", "us", first, smaller_is_better=True)
        report.measure(case, scale.rounds)
        case = StoreCase("view of 1 MiB, verified each time", "us", partial(view, always=True), smaller_is_better=True)
        report.measure(case, scale.rounds)


def _tcp(report: ClaimReport, options: Options) -> None:
    """1 MiB over TCP sockets on this machine."""
    scale = options.scale
    count, seconds = scale.num_large, scale.seconds
    if iperf_gb_s() is None:
        say("tcp is measured without a baseline: iperf3 is not installed (apt-get install iperf3)")
    with _large_pool(scale) as pool:
        writer, reader = pool.clients
        common: dict[str, Any] = {"way": "tcp", "count": count, "batch": True, "seconds": seconds, "best": False}
        get, put = partial(reader.do, "get", label=_LABEL, **common), partial(writer.do, "put", **common)
        for name, work, claim in (("get", get, 0.75), ("put", put, 0.7)):
            case = StoreCase(
                f"{name} 1 MiB over tcp, batches of {count} (beside: iperf3)", "GB/s", work, iperf_gb_s, claim
            )
            report.measure(case, scale.rounds)
            bare = partial(bare_gb_s, name, count, seconds)
            case = StoreCase(
                f"{name} 1 MiB over tcp, batches of {count} (beside: bare sockets and crc32c)", "GB/s", work, bare
            )
            report.measure(case, scale.rounds)


def _redis(report: ClaimReport, options: Options) -> None:
    """1 MiB, by our Python client and by redis' one; get returns new bytes."""
    scale = options.scale
    count, seconds = scale.num_large, scale.seconds
    missing = store_redis.missing()
    if missing is not None:
        say(f"redis is not measured: {missing}")
        return
    with _large_pool(scale) as pool, store_redis.redis_server(str(pool.folder)) as port:
        writer, reader = pool.clients
        for batch, how in ((False, "one by one"), (True, f"batches of {count}")):
            common: dict[str, Any] = {"count": count, "batch": batch, "seconds": seconds}
            get = partial(reader.do, "get_bytes", label=_LABEL, **common)
            other = partial(reader.do, "redis_get", port=port, **common)
            report.measure(
                StoreCase(f"get 1 MiB, {how} (beside: redis)", "GB/s", get, other, _REDIS_RATIO), scale.rounds
            )
            put = partial(writer.do, "put", way="shm", best=False, **common)
            other = partial(writer.do, "redis_put", port=port, **common)
            report.measure(
                StoreCase(f"put 1 MiB, {how} (beside: redis)", "GB/s", put, other, _REDIS_RATIO), scale.rounds
            )


def _calls(report: ClaimReport, options: Options) -> None:
    """The master alone, called by both clients in parallel."""
    scale = options.scale
    with start_pool(master={"segment_ttl_s": 1e6}, apart=True) as pool:
        pool.clients[0].do("mount", count=1, nbytes=_PAPER_NBYTES)
        filler = Filler(pool, nbytes=MIB, chained=False)
        filler.grow(scale.num_objects)
        known: dict[str, Any] = {"first": 0, "count": scale.num_objects, "seconds": scale.seconds}
        exist = partial(pool.run_on_all, "exist", **known)
        exist_many = partial(pool.run_on_all, "exist_many", **known)
        store = partial(filler.grow, scale.num_objects)
        for case in (
            StoreCase("exist with leases, one key a call", "calls/s", exist, _EXIST_PER_S, 1.0),
            StoreCase(f"exist with leases, batches of {BATCH:,}", "keys/s", exist_many, _EXIST_KEYS_PER_S, 1.0),
            StoreCase(f"put_start + put_end, batches of {BATCH:,}", "objects/s", store, _STORED_PER_S, 1.0),
        ):
            report.measure(case, scale.rounds)


def _small(report: ClaimReport, options: Options) -> None:
    """4 KiB, both clients in parallel and one alone."""
    scale = options.scale
    # One set of batches stays, and each client adds one; with its header an object takes twice its size.
    dram_nbytes = (1 + NUM_CLIENTS) * scale.num_small_batches * SMALL_BATCH * 2 * SMALL_NBYTES
    with start_pool(node={"dram_nbytes": 2 * dram_nbytes + _SPARE_NBYTES}) as pool:
        count = scale.num_small_batches
        pool.clients[0].do("put_small", label=_LABEL, num_batches=count)
        get = partial(pool.run_on_all, "get_small", label=_LABEL, num_batches=count, seconds=scale.seconds)
        put = partial(pool.run_on_all, "put_small", num_batches=count)
        name = f"4 KiB, batches of {SMALL_BATCH:,}"
        report.measure(StoreCase(f"get {name}", "objects/s", get, _SMALL_GETS_PER_S, 1.0), scale.rounds)
        report.measure(StoreCase(f"put {name}", "objects/s", put, _SMALL_PUTS_PER_S, 1.0), scale.rounds)
        # The clients share two processors with each other and the master: one alone is more than half of both.
        writer, reader = pool.clients
        get = partial(reader.do, "get_small", label=_LABEL, num_batches=count, seconds=scale.seconds)
        put = partial(writer.do, "put_small", num_batches=count)
        report.measure(StoreCase(f"get {name}, one client", "objects/s", get), scale.rounds)
        report.measure(StoreCase(f"put {name}, one client", "objects/s", put), scale.rounds)


@contextlib.contextmanager
def _large_pool(scale: BenchScale) -> Iterator[BenchPool]:
    """Start a pool that holds objects of 1 MiB, put by the first client."""
    with start_pool(node={"dram_nbytes": 4 * scale.num_large * MIB + _SPARE_NBYTES}) as pool:
        pool.clients[0].do("fill", label=_LABEL, count=scale.num_large)
        yield pool


def _grow(report: ClaimReport, options: Options) -> None:
    store_large.measure(report, options.num_objects, options.scale.seconds)


def _ssd(report: ClaimReport, options: Options) -> None:
    store_ssd.measure(report, options.scale, options.folder)


CASES: dict[str, Callable[[ClaimReport, Options], None]] = {
    "copy": _copy,
    "view": _view,
    "tcp": _tcp,
    "redis": _redis,
    "calls": _calls,
    "small": _small,
    "ssd": _ssd,
    "grow": _grow,
}
