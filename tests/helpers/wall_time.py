"""Wall time on a machine that others use too."""

from __future__ import annotations

import time

_CPU_S = 0.2


def crowding() -> float:
    """Return by which factor other processes slow this one down now: wall time by CPU time of a short loop, at least 1.

    For claims about wall time that hold on a machine of one's own: multiply the limit by it.
    """
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu_s < _CPU_S:
        pass
    return max(1.0, (time.perf_counter() - wall_s) / (time.thread_time() - cpu_s))
