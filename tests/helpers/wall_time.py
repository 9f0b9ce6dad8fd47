"""Wall time on a machine that others use too."""

from __future__ import annotations

import os
import time
from pathlib import Path

_CPU_S = 0.2


def crowding() -> float:
    """Return by which factor other processes slow this one down now: wall time by CPU time of a short loop, at least 1.

    For claims about wall time that hold on a machine of one's own: multiply the limit by it.
    """
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu_s < _CPU_S:
        pass
    return max(1.0, (time.perf_counter() - wall_s) / (time.thread_time() - cpu_s))


def stolen_s() -> list[float]:
    """Return how long, since it started, each processor stood still because the host of this virtual machine ran
    something else.
    """
    lines = Path("/proc/stat").read_text().splitlines()
    per_second = os.sysconf("SC_CLK_TCK")
    return [int(line.split()[8]) / per_second for line in lines if line.startswith("cpu") and line[3].isdigit()]
