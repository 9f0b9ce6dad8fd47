"""The SSD tier through the pool, beside fio: a node with little memory and a disk, 1 MiB objects.

Offload: from the first put until the last object is on disk. As many objects as memory holds are offloaded before, so
that all memory was touched, as fio's blocks were. Get: of objects that are on disk only, each once, in batches into
aligned memory, with checksums and without promotion. fio: as many bytes in requests of 1 MiB, direct, sequential, one
at a time, in a file in the same folder whose blocks were all written before; writing includes a sync at the end (ours
syncs before each reply: every 64 MiB or sooner).
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import time
from pathlib import Path

from moonpool.base.errors import Unavailable
from moonpool.base.own_folder import OwnFolder
from moonpool.bench.store_case import BenchScale, ClaimReport, StoreCase, say
from moonpool.bench.store_objects import MIB
from moonpool.bench.store_pool import BenchClient, start_pool

_RULES = {"promote_after_hits": 0, "read_ahead_blocks": 0, "hot_hits": 0}
_DISK = "bench.ssd"
_BATCH = 32
_STALL_S = 60.0
_READ_CLAIM, _OFFLOAD_CLAIM = 0.8, 0.6


def measure(report: ClaimReport, scale: BenchScale, folder: str | None) -> None:
    if shutil.which("fio") is None:
        say("ssd is not measured: fio is not installed (apt-get install fio)")
        return
    count = scale.ssd_nbytes // MIB
    dram_nbytes = max(scale.ssd_nbytes // 4, 16 * MIB)
    figures: dict[str, list[float]] = {name: [] for name in ("write", "read", "offload", "get")}
    for _ in range(scale.rounds):
        node = {"dram_nbytes": dram_nbytes, "ssd_nbytes": 3 * scale.ssd_nbytes + 64 * MIB}
        with (
            OwnFolder("mp.bench-", Path(folder) if folder else None) as disk,
            start_pool(master=_RULES, node={**node, "ssd_dir": f"{disk}/ssd"}) as pool,
        ):
            baseline = disk / "fio"
            _fio_gb_s(baseline, "write", scale.ssd_nbytes)
            figures["write"].append(_fio_gb_s(baseline, "write", scale.ssd_nbytes))
            writer, reader = pool.clients
            num_fit, step = dram_nbytes // MIB, dram_nbytes // 4 // MIB
            _offload(writer, 0, num_fit, step)
            figures["offload"].append(_offload(writer, num_fit, count, step))
            figures["read"].append(_fio_gb_s(baseline, "read", scale.ssd_nbytes))
            figures["get"].append(reader.do("get_cold", batch=_BATCH))
            if not reader.do("stats")["ssd_hits"]:
                raise Unavailable("nothing was read from disk")
    for name, ours, fio, claim in (
        (f"get of 1 MiB from SSD, batches of {_BATCH} (beside: fio read)", "get", "read", _READ_CLAIM),
        ("offload of 1 MiB objects to SSD (beside: fio write)", "offload", "write", _OFFLOAD_CLAIM),
    ):
        case = StoreCase(name, "GB/s", float, None, claim)
        report.add(case, statistics.median(figures[ours]), statistics.median(figures[fio]))


def _offload(writer: BenchClient, first: int, count: int, step: int) -> float:
    """Put objects in steps that fit into memory, each when enough earlier ones are on disk; return GB/s."""
    started_s = time.perf_counter()
    for start in range(first, first + count, step):
        _wait_for(writer, start - 2 * step)
        writer.do("fill", label="cold", first=start, count=min(step, first + count - start))
    _wait_for(writer, first + count)
    return count * MIB / 1e9 / (time.perf_counter() - started_s)


def _wait_for(client: BenchClient, num_offloaded: int) -> None:
    ends_s = time.monotonic() + _STALL_S
    while client.do("stats")[_DISK] < num_offloaded:
        if time.monotonic() > ends_s:
            raise Unavailable(f"the disk has fewer than {num_offloaded} objects after {_STALL_S:g} s")
        time.sleep(0.005)


def _fio_gb_s(path: Path, op: str, nbytes: int) -> float:
    command = [
        "fio", "--name=baseline", f"--filename={path}", f"--rw={op}", "--bs=1M", "--direct=1", f"--size={nbytes}",
        "--ioengine=psync", "--overwrite=1", "--end_fsync=1", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=path.parent, check=False)
    if done.returncode:
        raise Unavailable(f"fio failed: {done.stderr.strip()[:200]}")
    job = json.loads(done.stdout)["jobs"][0]
    return nbytes / 1e9 / (float(job["job_runtime"]) / 1000)
