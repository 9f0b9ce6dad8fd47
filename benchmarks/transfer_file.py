"""The file transport beside fio: direct sequential transfers of 1 MiB, on one file of one filesystem, in turns.

    python benchmarks/transfer_file.py [--json] [--dir DIR] [--size-mib 512] [--seconds 1] [--rounds 3]

Ours is a peer's handle (owner and generations checked on every call), read and written by 1 or 4 threads. fio runs
with as many jobs (psync, each thread on its own part of the file) and, as a second baseline, with io_uring or libaio
and that many requests in flight. Both sides of a pair are measured in turns, medians are compared. The claim: reads at
0.8 of fio or more. fio uses memory of its own (small pages where the kernel gives huge ones on demand only), we use
aligned_buffer(). Also shown, without fio: the price of memory that is not aligned.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import numpy as np

from moonpool.bench.report import BenchReport, bench_parser
from moonpool.transfer import FileSegment, SegmentDescriptor, aligned_buffer, host_id
from moonpool.transfer.transports.file.transport import FileRemote, FileTransport

MIB = 1 << 20


def fio(path: str, op: str, size_nbytes: int, seconds: float, engine: str, jobs: int, depth: int) -> float | None:
    """MiB/s; None, and a line that says so, when fio cannot run this engine here."""
    share = size_nbytes // jobs
    command = [
        "fio", "--name=baseline", f"--filename={path}", f"--rw={op}", "--bs=1M", "--direct=1", f"--size={share}",
        f"--offset_increment={share}", f"--ioengine={engine}", f"--numjobs={jobs}", f"--iodepth={depth}", "--thread",
        f"--runtime={seconds}", "--time_based", "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=os.path.dirname(path))
    if done.returncode:
        print(f"transfer_file: fio cannot run {engine} here: {done.stderr.strip()[:200]}", file=sys.stderr)
        return None
    return float(json.loads(done.stdout)["jobs"][0][op]["bw_bytes"]) / MIB


def ours(remote: FileRemote, op: str, seconds: float, threads: int, *, aligned: bool = True) -> float:
    """MiB/s of so many threads, each going round its own part of the file."""
    share = remote.nbytes // threads
    started = threading.Barrier(threads + 1)
    moved = [0] * threads

    def work(lane: int) -> None:
        spare = 0 if aligned else 8
        page = aligned_buffer(MIB + spare)[spare:]
        page[:] = np.random.default_rng(lane).bytes(MIB)
        move: Callable[[int], None] = (
            (lambda at: remote.read_into(at, [page], timeout_s=30))
            if op == "read"
            else (lambda at: remote.write_from(at, [page], generation=1, timeout_s=30))
        )
        started.wait()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            move(lane * share + moved[lane] % (share // MIB) * MIB)
            moved[lane] += 1

    workers = [threading.Thread(target=work, args=(lane,)) for lane in range(threads)]
    for worker in workers:
        worker.start()
    started.wait()
    begin = time.monotonic()
    for worker in workers:
        worker.join()
    return sum(moved) / (time.monotonic() - begin)


def compare(report: BenchReport, options: argparse.Namespace, remote: FileRemote, path: str, op: str) -> None:
    size, seconds = options.size_mib * MIB, options.seconds
    for width in (1, 4):
        engines = [("psync", width, 1)] + ([(e, 1, width) for e in ("io_uring", "libaio")] if width > 1 else [])
        values: list[float] = []
        baselines: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            values.append(ours(remote, op, seconds, width))
            for engine, jobs, depth in engines:
                rate = fio(path, op, size, seconds, engine, jobs, depth)
                if rate is not None:
                    baselines.setdefault(f"{engine} numjobs={jobs} iodepth={depth}", []).append(rate)
        for name, rates in baselines.items():
            case = f"{op}, {width} thread(s), vs fio {name}"
            report.add(case, statistics.median(values), "MiB/s", statistics.median(rates))


def measure(report: BenchReport, options: argparse.Namespace, folder: str) -> None:
    path = os.path.join(folder, "segment")
    transport = FileTransport()
    with FileSegment.create(path, options.size_mib * MIB, granule_nbytes=MIB, incarnation=1) as segment:
        endpoint = transport.serve(segment)
        descriptor = SegmentDescriptor(
            name=segment.name, nbytes=segment.nbytes, incarnation=1, host=host_id(), endpoints=(endpoint,)
        )
        remote = transport.open(descriptor, endpoint, timeout_s=1.0)
        assert isinstance(remote, FileRemote)
        if not remote.direct:
            print(f"{folder} has no direct I/O, nothing is measured; give --dir on a disk")
            return
        # Every block is written first: reading space that was only reserved would not touch the disk.
        page = aligned_buffer(MIB)
        page[:] = np.random.default_rng(0).bytes(MIB)
        for at in range(0, remote.nbytes, MIB):
            remote.write_from(at, [page], generation=1, timeout_s=30)
        remote.sync()
        for op in ("read", "write"):
            compare(report, options, remote, path, op)
        assert remote.num_bounces == 0
        pairs = [
            [ours(remote, "read", options.seconds, 1, aligned=a) for a in (False, True)] for _ in range(options.rounds)
        ]
        unaligned, aligned = (statistics.median(rates) for rates in zip(*pairs, strict=True))
        report.add("read, memory not aligned, vs aligned", unaligned, "MiB/s", aligned)
        remote.close()
        transport.close()


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--dir", default=None, help="a folder on the disk to measure (default: the temporary one)")
    parser.add_argument("--size-mib", type=int, default=512)
    parser.add_argument("--seconds", type=int, default=1, help="per measurement")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if shutil.which("fio") is None:
        print("transfer_file: fio is not installed (apt-get install fio), so there is nothing to compare with")
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        measure(BenchReport.from_options("transfer_file", options), options, folder)


if __name__ == "__main__":
    main()
