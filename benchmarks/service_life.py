"""How soon a service of two prefill and two decode workers is ready, what memory it takes, and how soon it ends.

    python benchmarks/service_life.py [--json] [--repeat 3]

The default model on the CPU. Aims: ready within 30 s, less than 6 GB, ended 5 s after Ctrl-C. The baseline of the first
two is one Python process that loads the same model and nothing else, measured in the same run; the time to end is
compared with its aim. The noise of "ready" is that of the machine: the processes start at the same time and share its
cores, so run it alone and take the median.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from moonpool.bench.report import BenchReport, bench_parser

GB = 1_000_000_000
READY_S, RESIDENT_NBYTES, ENDED_S = 30.0, 6 * GB, 5.0
_ONE_PROCESS = """
import resource, time
began_s = time.monotonic()
from moonpool.engine.config import EngineConfig
from moonpool.engine.load import load_engine
engine = load_engine("smollm2", EngineConfig(num_pages=16))
print(time.monotonic() - began_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def one_process() -> tuple[float, float]:
    """Return the seconds in which one process loads the model, and its resident bytes."""
    ran = subprocess.run([sys.executable, "-c", _ONE_PROCESS], capture_output=True, text=True, check=True)
    seconds, nbytes = map(float, ran.stdout.split())
    return seconds, nbytes


def service_life() -> tuple[float, float, float]:
    """Return the seconds until it was ready, its resident bytes after some requests, and the seconds to its end."""
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        command = [sys.executable, "-m", "moonpool", "serve", "--port", "0", "--state-dir", folder]
        process = subprocess.Popen(
            [*command, "--prefill", "2", "--decode", "2"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        url = next(found[1] for line in process.stdout if (found := re.search(r"at (http\S+)/v1", line)))
        ready_s = time.monotonic() - began_s
        for number in range(4):
            prompt = [(7 * i + number) % 4000 + 500 for i in range(600)]
            body = {"model": "smollm2", "prompt": prompt, "max_tokens": 8}
            httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False).raise_for_status()
        nbytes = resident_nbytes(process.pid)
        began_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(60)
        return ready_s, nbytes, time.monotonic() - began_s


def resident_nbytes(launcher: int) -> float:
    """Return what the machine's memory holds for the service: shared pages once, memfds whole, even if several
    processes have mapped them."""
    own, memfds = 0, {}
    root = psutil.Process(launcher)
    for process in [root, *root.children(recursive=True)]:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        own += sum(int(match[1]) * 1024 for match in re.finditer(r"^Pss_(?:Anon|File): +(\d+) kB", rollup, re.M))
        for fd in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(fd).startswith("/memfd:"):
                    memfds[fd.stat().st_ino] = fd.stat().st_blocks * 512
    return own + sum(memfds.values())


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    report = BenchReport.from_options("service_life", arguments)
    alone_s, alone_nbytes = one_process()
    lives = [service_life() for _ in range(arguments.repeat)]
    ready_s, nbytes, ended_s = (statistics.median(column) for column in zip(*lives, strict=True))
    rows = [
        ("ready, 2 prefill and 2 decode workers", ready_s, "s", alone_s, READY_S),
        ("resident memory", nbytes / GB, "GB", alone_nbytes / GB, RESIDENT_NBYTES / GB),
        ("ended after Ctrl-C", ended_s, "s", ENDED_S, ENDED_S),
    ]
    for case, value, unit, baseline, aim in rows:
        report.add(case, value, unit, baseline, at_most=aim)
    return 0 if all(value < aim for _, value, _, _, aim in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
