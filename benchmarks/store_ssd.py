"""The SSD log beside fio: objects of 1 MiB against direct sequential transfers of 1 MiB, same folder, in turns.

    python benchmarks/store_ssd.py [--json] [--dir DIR] [--size-mib 1024] [--batch 32] [--rounds 5]

Ours: append_many() of batches from aligned memory (headers checked, batches framed, files sealed and begun; a sync() at
the end of each turn is in the time), into fresh files and into files that an earlier life of the log has written; and
read_many() and read_into() into aligned memory, every checksum verified. fio: psync, one job, the same number of bytes,
end_fsync for writes, on a file of its own whose blocks were all written before. The claims: reads at 0.8 of fio or
more, the offload at 0.6 or more. Also shown: how long open() takes to find everything again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time

import numpy as np

from moonpool.base.checksum import crc32c
from moonpool.base.object_header import ObjectHeader, Piece, header_nbytes
from moonpool.bench.report import BenchReport, bench_parser
from moonpool.node.ssd import LogItem, LogLocation, LogRead, SsdConfig, SsdLog
from moonpool.transfer import aligned_buffer

MIB = 1 << 20
KEY_NBYTES = 36
OBJECT_NBYTES = header_nbytes(KEY_NBYTES, 1) + MIB


def fio(path: str, op: str, size_nbytes: int) -> float:
    """MiB/s."""
    command = [
        "fio", "--name=baseline", f"--filename={path}", f"--rw={op}", "--bs=1M", "--direct=1", f"--size={size_nbytes}",
        "--ioengine=psync", "--overwrite=1", "--end_fsync=1", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=os.path.dirname(path))
    job = json.loads(done.stdout)["jobs"][0]
    return size_nbytes / MIB / (float(job["job_runtime"]) / 1000)


def objects(count: int) -> list[LogItem]:
    """Each in aligned memory, header and piece as they lie in DRAM."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        view = aligned_buffer(OBJECT_NBYTES)
        view[-MIB:] = rng.bytes(MIB)
        key = number.to_bytes(KEY_NBYTES, "big")
        view[:-MIB] = ObjectHeader(key=key, generation=1, pieces=(Piece(MIB, crc32c(view[-MIB:])),)).pack()
        made.append(LogItem(key, 1, [view]))
    return made


def renamed(items: list[LogItem], first: int) -> list[LogItem]:
    """The same memory under the next keys."""
    for number, item in enumerate(items):
        view = memoryview(item.parts[0])  # type: ignore[arg-type]
        key = (first + number).to_bytes(KEY_NBYTES, "big")
        pieces = (Piece(MIB, crc32c(view[-MIB:])),)
        view[:-MIB] = ObjectHeader(key=key, generation=1, pieces=pieces).pack()
        items[number] = LogItem(key, 1, item.parts)
    return items


def offload(log: SsdLog, items: list[LogItem], num_batches: int, first: int) -> tuple[float, dict[bytes, LogLocation]]:
    """MiB/s of objects, and where they lie. Preparing the next batch is not in the time."""
    spent_s, where = 0.0, {}
    for number in range(num_batches):
        batch = renamed(items, first + number * len(items))
        start = time.perf_counter()
        results = log.append_many(batch)
        if number == num_batches - 1:
            log.sync()
        spent_s += time.perf_counter() - start
        for item, result in zip(batch, results, strict=True):
            if not isinstance(result, LogLocation):
                raise result
            where[item.key] = result
    return num_batches * len(items) * OBJECT_NBYTES / MIB / spent_s, where


def read_back(log: SsdLog, where: dict[bytes, LogLocation], batch: int) -> float:
    """MiB/s of objects, `batch` per call."""
    views = [aligned_buffer(OBJECT_NBYTES) for _ in range(batch)]
    for view in views:
        view[::4096] = bytes(len(view[::4096]))  # its pages are there before the clock runs
    wanted = list(where.items())
    start = time.perf_counter()
    for at in range(0, len(wanted), batch):
        part = zip(wanted[at : at + batch], views, strict=False)
        errors = log.read_many([LogRead(key, 1, location, [view]) for (key, location), view in part])
        assert not any(errors), errors
    return len(wanted) * OBJECT_NBYTES / MIB / (time.perf_counter() - start)


def empty(log: SsdLog) -> None:
    log.remove([(stored.key, stored.generation) for stored in log.items()])
    log.compact(1)
    for file in log.drained():
        log.release(file)


def measure(options: argparse.Namespace, folder: str, report: BenchReport) -> None:
    size_nbytes, baseline_path = options.size_mib * MIB, os.path.join(folder, "fio")
    num_batches = max(1, options.size_mib // options.batch)
    config = SsdConfig(max_nbytes=max(4 * size_nbytes, 2048 * MIB))
    results: dict[str, list[float]] = {
        name: [] for name in ("fresh", "again", "many", "single", "open", "write", "read")
    }
    items = objects(options.batch)
    fio(baseline_path, "write", size_nbytes)
    for _ in range(options.rounds):
        path = os.path.join(folder, "log")
        with SsdLog.open(path, config) as log:
            if not log.stats().direct:
                print(f"{folder} has no direct I/O, nothing is measured; give --dir on a disk")
                return
            results["fresh"].append(offload(log, items, num_batches, 0)[0])
            results["write"].append(fio(baseline_path, "write", size_nbytes))
            empty(log)
            rate, where = offload(log, items, num_batches, 1 << 20)
            results["again"].append(rate)
            results["read"].append(fio(baseline_path, "read", size_nbytes))
            results["many"].append(read_back(log, where, options.batch))
            results["single"].append(read_back(log, where, 1))
        results["open"].append(time_to_open(path, config))
        shutil.rmtree(path)
    found = {name: statistics.median(values) for name, values in results.items()}
    many = f"1 MiB objects, {options.batch} a call"
    report.add(f"offload of {many}, fresh files", found["fresh"], "MiB/s", found["write"], baseline_is="fio")
    report.add(f"offload of {many}, used files", found["again"], "MiB/s", found["write"], baseline_is="fio")
    report.add(f"read of {many}", found["many"], "MiB/s", found["read"], baseline_is="fio")
    report.add("read of 1 MiB objects, one a call", found["single"], "MiB/s", found["read"], baseline_is="fio")
    report.add(f"open() of {options.size_mib} MiB", found["open"], "s")


def time_to_open(path: str, config: SsdConfig) -> float:
    start = time.perf_counter()
    log = SsdLog.open(path, config)
    spent_s = time.perf_counter() - start
    log.close()
    return spent_s


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--dir", default=None, help="a folder on the disk to measure (default: the temporary one)")
    parser.add_argument("--size-mib", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=32, help="objects per call")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if shutil.which("fio") is None:
        print("store_ssd: fio is not installed (apt-get install fio), so there is nothing to compare with")
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        measure(options, folder, BenchReport.from_options("store_ssd", options))


if __name__ == "__main__":
    main()
