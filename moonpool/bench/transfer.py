"""What `moonpool bench transfer` and benchmarks/transfer.py measure: tcp and shm, from one process to another.

Every case and its baseline are measured once per round, and the best round of each counts. Within a round, tcp and
iperf3 are given as the mean, copies and their baseline as the best. The first line shows the load of the machine: if
others use it, the ratios mean little. The other process is this module run as a program.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from moonpool.bench.iperf import iperf_gb_s
from moonpool.bench.report import BenchReport
from moonpool.transfer import (
    RemoteSegment,
    SegmentDescriptor,
    TransferConfig,
    TransferEngine,
    TransferOp,
    TransferRequest,
)

_CERTIFICATE_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_GRANULE_NBYTES = 4096
_MIB = 1 << 20
_NBYTES = 64 * _MIB
_TIMEOUT_S = 30.0
ROUNDS, SECONDS = 3, 1.0  # measurements per case, and how long each takes
_NUM_SMALL, _SMALL_NBYTES = 1000, 4096
_SHM_SMALL_PER_S, _TCP_SMALL_PER_S, _VIEW_US = 100_000.0, 50_000.0, 50.0  # claims where nothing is comparable
Items = list[tuple[int, NDArray[np.uint8]]]


class TransferCase(NamedTuple):
    """`measure` and `baseline` return a figure in `unit`. A number as baseline is a claim; None: no baseline."""

    name: str
    unit: str
    measure: Callable[[], float]
    baseline: Callable[[], float | None] | float
    smaller_is_better: bool = False


class Bench(NamedTuple):
    """One path to the other process, and how long to measure."""

    engine: TransferEngine
    remote: RemoteSegment
    seconds: float

    def read_each(self, items: Items) -> float:
        """Return GB/s, one request at a time."""

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
        """Return GB/s, with many requests in flight."""
        return _gb(items) / mean_s(lambda: self.remote.read_many(items, timeout_s=_TIMEOUT_S), self.seconds)

    def write_many(self, items: Items) -> float:
        work = partial(self.remote.write_many, items, generation=0, timeout_s=_TIMEOUT_S)
        return _gb(items) / mean_s(work, self.seconds)

    def submit(self, op: TransferOp, items: Items) -> float:
        """Return GB/s by the engine's threads, one request per item."""
        requests = [TransferRequest(op, self.remote, offset, [piece]) for offset, piece in items]
        work = partial(self.engine.submit, requests, timeout_s=_TIMEOUT_S)
        return _gb(items) / mean_s(lambda: work().wait(), self.seconds)

    def memcpy(self, items: Items) -> float:
        """Return GB/s of a plain copy to the same places from memory of this process."""
        source = np.ones(_NBYTES, np.uint8)

        def work() -> None:
            for offset, piece in items:
                np.copyto(piece, source[offset : offset + piece.size])

        return _gb(items) / best_s(work, self.seconds)

    def view_us(self, nbytes: int) -> float:
        return best_s(lambda: self.remote.view(0, nbytes), self.seconds) * 1e6


def run(report: BenchReport, *, rounds: int, seconds: float) -> None:
    """Report one figure per case; each is measured `rounds` times for `seconds`."""
    report.add("machine's load before", os.getloadavg()[0], "cores")
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder, _owner(folder, {}) as segments:
        for way, cases in (("shm", _shm_cases), ("tcp", _tcp_cases)):
            with _engine(folder, {}) as engine:
                benches = [Bench(engine, engine.open(_only(segment, way)), seconds) for segment in segments]
                for case in cases(*benches):
                    _measure(report, case, rounds)
        with _engine(folder, {}) as engine:
            plain = Bench(engine, engine.open(_only(segments[0], "tcp")), seconds)
            for label, settings in _guards(Path(folder)):
                with _owner(folder, settings) as guarded, _engine(folder, settings) as other:
                    bench = Bench(other, other.open(_only(guarded[0], "tcp")), seconds)
                    for case in _guarded_cases(label, bench, plain):
                        _measure(report, case, rounds)


def _guards(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    secret = _secret_settings(folder)
    yield "with a secret", secret
    tls = _tls_settings(folder)
    if tls is None:
        print("tcp with TLS is not measured: there is no openssl command to make a certificate", file=sys.stderr)
    else:
        yield "with TLS and a secret", secret | tls


def _measure(report: BenchReport, case: TransferCase, rounds: int) -> None:
    best = min if case.smaller_is_better else max
    values, baselines = [], []
    for _ in range(rounds):
        values.append(case.measure())
        baselines.append(case.baseline() if callable(case.baseline) else case.baseline)
    found = [baseline for baseline in baselines if baseline is not None]
    report.add(case.name, best(values), case.unit, best(found) if found else None)


def _shm_cases(bench: Bench, fenced: Bench) -> Iterator[TransferCase]:
    for label, nbytes in (("1 MiB", _MIB), ("64 MiB", _NBYTES)):
        items = _pieces(nbytes)
        memcpy = partial(bench.memcpy, items)
        yield TransferCase(f"shm read, {label} (beside: memcpy)", "GB/s", partial(bench.read_each, items), memcpy)
        yield TransferCase(f"shm write, {label} (beside: memcpy)", "GB/s", partial(bench.write_each, items), memcpy)
    for label, nbytes in (("4 KiB", 4096), ("64 MiB", _NBYTES)):
        yield TransferCase(
            f"shm view of {label}", "us", partial(bench.view_us, nbytes), _VIEW_US, smaller_is_better=True
        )
    yield from _small_cases(bench, fenced, _SHM_SMALL_PER_S)


def _tcp_cases(bench: Bench, fenced: Bench) -> Iterator[TransferCase]:
    # iperf3 sends and receives the same 1 MiB over and over; so does the first pair of cases. The second walks
    # through memory that no cache holds.
    for label, span_nbytes in (("", _MIB), (" over 64 MiB", _NBYTES)):
        items = _pieces(_MIB, span_nbytes)
        yield TransferCase(
            f"tcp read, 1 MiB{label} (beside: iperf3)", "GB/s", partial(bench.read_many, items), iperf_gb_s
        )
        yield TransferCase(
            f"tcp write, 1 MiB{label} (beside: iperf3)", "GB/s", partial(bench.write_many, items), iperf_gb_s
        )
    yield from _small_cases(bench, fenced, _TCP_SMALL_PER_S)


def _guarded_cases(label: str, bench: Bench, plain: Bench) -> Iterator[TransferCase]:
    items = _pieces(_MIB, _MIB)
    reads, writes = partial(bench.read_many, items), partial(bench.write_many, items)
    yield TransferCase(f"tcp read, 1 MiB {label} (beside: without)", "GB/s", reads, partial(plain.read_many, items))
    yield TransferCase(f"tcp write, 1 MiB {label} (beside: without)", "GB/s", writes, partial(plain.write_many, items))


def _small_cases(bench: Bench, fenced: Bench, claim_per_s: float) -> Iterator[TransferCase]:
    memory = np.ones(_NUM_SMALL * _SMALL_NBYTES * 2, np.uint8)
    starts = range(0, memory.size, _SMALL_NBYTES * 2)
    items = [(start, memory[start : start + _SMALL_NBYTES]) for start in starts]
    way, unit = bench.remote.transport, "transfers/s"

    def per_s(measure: Callable[[Items], float]) -> float:
        return measure(items) * 1e9 / _SMALL_NBYTES

    for op, measure in (("read", bench.read_many), ("write", bench.write_many)):
        yield TransferCase(f"{way} {op}, batches of 1,000 x 4 KiB", unit, partial(per_s, measure), claim_per_s)
    for asked in TransferOp:
        name = f"{way} {asked.value} by submit(), 1,000 x 4 KiB"
        yield TransferCase(name, unit, partial(per_s, partial(bench.submit, asked)), claim_per_s)
    name = f"{way} fenced write, 1,000 x 4 KiB (beside: plain)"
    yield TransferCase(name, unit, partial(per_s, fenced.write_many), partial(per_s, bench.write_many))


def _pieces(nbytes: int, span_nbytes: int = _NBYTES) -> Items:
    """Return 64 MiB in pieces of `nbytes`, taken from `span_nbytes` of memory again and again."""
    memory = np.ones(span_nbytes, np.uint8)
    offsets = [start % span_nbytes for start in range(0, _NBYTES, nbytes)]
    return [(offset, memory[offset : offset + nbytes]) for offset in offsets]


def _gb(items: Items) -> float:
    return sum(piece.size for _, piece in items) / 1e9


def best_s(work: Callable[[], object], for_s: float) -> float:
    """Return the shortest time of as many runs as fit."""
    return min(_times_s(work, for_s))


def mean_s(work: Callable[[], object], for_s: float) -> float:
    """Return the mean time of as many runs as fit."""
    times_s = list(_times_s(work, for_s))
    return sum(times_s) / len(times_s)


def _times_s(work: Callable[[], object], for_s: float) -> Iterator[float]:
    work()  # warm-up: page faults, and socket buffers that grow
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


def _engine(run_dir: str, settings: dict[str, Any]) -> TransferEngine:
    """Return an engine that connects and serves nothing."""
    return TransferEngine(TransferConfig(run_dir=run_dir, tcp_host=None, **settings))


@contextlib.contextmanager
def _owner(run_dir: str, settings: dict[str, Any]) -> Iterator[list[SegmentDescriptor]]:
    """Start a process that serves 64 MiB, and 64 MiB with a fence; yield their descriptors."""
    command = [sys.executable, "-m", "moonpool.bench.transfer", run_dir, str(_NBYTES), json.dumps(settings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield msgspec.json.decode(process.stdout.readline(), type=list[SegmentDescriptor])
        finally:
            process.kill()


def _secret_settings(folder: Path) -> dict[str, Any]:
    """Make a throwaway secret; return the WireConfig settings for both processes."""
    file = folder / "secret"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    return {"secret_file": str(file)}


def _tls_settings(folder: Path) -> dict[str, Any] | None:
    """Make a self-signed certificate; return the WireConfig settings for both processes. None without openssl."""
    if shutil.which("openssl") is None:
        return None
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subject = ("-subj", "/CN=moonpool bench", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2")
    command = ["openssl", "req", "-x509", *_CERTIFICATE_KEY, "-keyout", key, "-out", cert, *subject]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return {"tls_cert_file": cert, "tls_key_file": key, "tls_ca_file": cert}


def _serve_segments(run_dir: str, nbytes: int, settings_json: str) -> None:
    """The other process: serve two segments, the second one fenced, and print their descriptors as JSON. Return when
    standard input ends. The settings are those of WireConfig that differ from their defaults."""
    with TransferEngine(TransferConfig(run_dir=run_dir, **json.loads(settings_json))) as engine:
        plain = engine.register("bench", nbytes=nbytes)
        fenced = engine.register("fenced", nbytes=nbytes, granule_nbytes=_GRANULE_NBYTES)
        print(msgspec.json.encode([plain, fenced]).decode(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _serve_segments(sys.argv[1], int(sys.argv[2]), sys.argv[3])
