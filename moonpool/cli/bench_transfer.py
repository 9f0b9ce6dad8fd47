"""What `moonpool bench transfer` and benchmarks/transfer.py measure: tcp and shm, from one process to another.

Every case is measured once per round, its baseline in the same round, and the best round of each counts. Within a
round tcp, as iperf3, is given as the mean, copies and their baseline as the best. The first line printed says how busy
the machine was: on one that others use too, no ratio means much.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from moonpool.cli.bench_iperf import iperf_gb_s
from moonpool.transfer import RemoteSegment, SegmentDescriptor, TransferConfig, TransferEngine

_MIB = 1 << 20
_NBYTES = 64 * _MIB
_TIMEOUT_S = 30.0
_SECONDS = 1.0  # per measurement
_NUM_SMALL, _SMALL_NBYTES = 1000, 4096
_SHM_SMALL_PER_S, _TCP_SMALL_PER_S, _VIEW_US = 100_000.0, 50_000.0, 50.0  # the claims, where nothing is comparable
Items = list[tuple[int, NDArray[np.uint8]]]


class Case(NamedTuple):
    """`measure` and `baseline` give a figure in `unit`; a number is a claim, None means nothing to compare with."""

    name: str
    unit: str
    measure: Callable[[], float]
    baseline: Callable[[], float | None] | float
    smaller_is_better: bool = False


class Bench(NamedTuple):
    """One way to the other process, and how long to measure."""

    remote: RemoteSegment
    seconds: float

    def read_each(self, items: Items) -> float:
        """GB/s, one request after the other."""

        def work() -> None:
            for offset, piece in items:
                self.remote.read_into(offset, [piece], timeout_s=_TIMEOUT_S)

        return _gb(items) / best_s(work, self.seconds)

    def write_each(self, items: Items) -> float:
        def work() -> None:
            for offset, piece in items:
                self.remote.write_from(offset, [piece], generation=0, timeout_s=_TIMEOUT_S)

        return _gb(items) / best_s(work, self.seconds)

    def read_many(self, items: Items) -> float:
        """GB/s, many requests under way."""
        return _gb(items) / mean_s(lambda: self.remote.read_many(items, timeout_s=_TIMEOUT_S), self.seconds)

    def write_many(self, items: Items) -> float:
        work = partial(self.remote.write_many, items, generation=0, timeout_s=_TIMEOUT_S)
        return _gb(items) / mean_s(work, self.seconds)

    def memcpy(self, items: Items) -> float:
        """GB/s of a plain copy into the same places from memory of this process."""
        source = np.ones(_NBYTES, np.uint8)

        def work() -> None:
            for offset, piece in items:
                np.copyto(piece, source[offset : offset + piece.size])

        return _gb(items) / best_s(work, self.seconds)

    def view_us(self, nbytes: int) -> float:
        return best_s(lambda: self.remote.view(0, nbytes), self.seconds) * 1e6


class Line(msgspec.Struct, kw_only=True):
    bench: str = "transfer"
    case: str
    value: float
    unit: str
    baseline: float | None
    ratio: float | None


def run(*, as_json: bool, rounds: int, seconds: float = _SECONDS) -> None:
    """Prints one line per case; each is measured `rounds` times for so many seconds."""
    show(Line(case="machine's load before", value=os.getloadavg()[0], unit="cores", baseline=None, ratio=None), as_json)
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as run_dir, _owner(run_dir) as descriptor:
        for way, cases in (("shm", _shm_cases), ("tcp", _tcp_cases)):
            config = TransferConfig(run_dir=str(Path(run_dir) / way), tcp_host=None)
            with TransferEngine(config) as engine:
                for case in cases(Bench(engine.open(_only(descriptor, way)), seconds)):
                    show(_measure(case, rounds), as_json)


def show(line: Line, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(line).decode(), flush=True)
        return
    beside = "" if line.baseline is None else f"  ({line.baseline:,.2f}, ratio {line.ratio:.2f})"
    print(f"{line.case:<44} {line.value:12,.2f} {line.unit}{beside}", flush=True)


def _measure(case: Case, rounds: int) -> Line:
    best = min if case.smaller_is_better else max
    values, baselines = [], []
    for _ in range(rounds):
        values.append(case.measure())
        baselines.append(case.baseline() if callable(case.baseline) else case.baseline)
    value = best(values)
    found = [baseline for baseline in baselines if baseline is not None]
    baseline = best(found) if found else None
    ratio = None if baseline is None else round(value / baseline, 3)
    return Line(case=case.name, value=round(value, 3), unit=case.unit, baseline=baseline, ratio=ratio)


def _shm_cases(bench: Bench) -> Iterator[Case]:
    for label, nbytes in (("1 MiB", _MIB), ("64 MiB", _NBYTES)):
        items = _pieces(nbytes)
        memcpy = partial(bench.memcpy, items)
        yield Case(f"shm read, {label} (beside: memcpy)", "GB/s", partial(bench.read_each, items), memcpy)
        yield Case(f"shm write, {label} (beside: memcpy)", "GB/s", partial(bench.write_each, items), memcpy)
    for label, nbytes in (("4 KiB", 4096), ("64 MiB", _NBYTES)):
        yield Case(f"shm view of {label}", "us", partial(bench.view_us, nbytes), _VIEW_US, smaller_is_better=True)
    yield from _small_cases(bench, _SHM_SMALL_PER_S)


def _tcp_cases(bench: Bench) -> Iterator[Case]:
    # iperf3 sends and receives the same 1 MiB over and over; so does the first pair of cases. The second walks
    # through memory that no cache holds.
    for label, span_nbytes in (("", _MIB), (" over 64 MiB", _NBYTES)):
        items = _pieces(_MIB, span_nbytes)
        yield Case(f"tcp read, 1 MiB{label} (beside: iperf3)", "GB/s", partial(bench.read_many, items), iperf_gb_s)
        yield Case(f"tcp write, 1 MiB{label} (beside: iperf3)", "GB/s", partial(bench.write_many, items), iperf_gb_s)
    yield from _small_cases(bench, _TCP_SMALL_PER_S)


def _small_cases(bench: Bench, claim_per_s: float) -> Iterator[Case]:
    memory = np.ones(_NUM_SMALL * _SMALL_NBYTES * 2, np.uint8)
    starts = range(0, memory.size, _SMALL_NBYTES * 2)
    items = [(start, memory[start : start + _SMALL_NBYTES]) for start in starts]

    def per_s(measure: Callable[[Items], float]) -> float:
        return measure(items) * 1e9 / _SMALL_NBYTES

    for op, measure in (("read", bench.read_many), ("write", bench.write_many)):
        name = f"{bench.remote.transport} {op}, batches of 1,000 x 4 KiB"
        yield Case(name, "transfers/s", partial(per_s, measure), claim_per_s)


def _pieces(nbytes: int, span_nbytes: int = _NBYTES) -> Items:
    """64 MiB in pieces of `nbytes`, taken from a span of memory that may be smaller."""
    memory = np.ones(span_nbytes, np.uint8)
    offsets = [start % span_nbytes for start in range(0, _NBYTES, nbytes)]
    return [(offset, memory[offset : offset + nbytes]) for offset in offsets]


def _gb(items: Items) -> float:
    return sum(piece.size for _, piece in items) / 1e9


def best_s(work: Callable[[], object], for_s: float) -> float:
    """The shortest of as many runs as fit in the time."""
    return min(_times_s(work, for_s))


def mean_s(work: Callable[[], object], for_s: float) -> float:
    """The mean of as many runs as fit in the time."""
    times_s = list(_times_s(work, for_s))
    return sum(times_s) / len(times_s)


def _times_s(work: Callable[[], object], for_s: float) -> Iterator[float]:
    work()  # the first one takes page faults and growing socket buffers
    ends_s = time.perf_counter() + for_s
    while True:
        started_s = time.perf_counter()
        work()
        ended_s = time.perf_counter()
        yield ended_s - started_s
        if ended_s >= ends_s:
            return


def _only(descriptor: SegmentDescriptor, way: str) -> SegmentDescriptor:
    kept = tuple(endpoint for endpoint in descriptor.endpoints if endpoint.startswith(f"{way}:"))
    return msgspec.structs.replace(descriptor, endpoints=kept)


@contextlib.contextmanager
def _owner(run_dir: str) -> Iterator[SegmentDescriptor]:
    """A second process that serves 64 MiB."""
    command = [sys.executable, "-m", "moonpool.cli.bench_owner", run_dir, str(_NBYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield msgspec.json.decode(process.stdout.readline(), type=SegmentDescriptor)
        finally:
            process.kill()
