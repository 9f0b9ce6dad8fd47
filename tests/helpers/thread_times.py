"""How long a thread was held up: the time in which it neither ran nor waited for a core. Other load does not count."""

from __future__ import annotations

import time


class HeldUp:
    """Measures the calling thread: `held = HeldUp(); call(); held.seconds()`."""

    def __init__(self) -> None:
        self._begun_s, self._busy_s = time.monotonic(), _busy_s()

    def seconds(self) -> float:
        return max(0.0, time.monotonic() - self._begun_s - (_busy_s() - self._busy_s))


def _busy_s() -> float:
    """How long this thread has run, or could have run had a core been free."""
    with open("/proc/thread-self/schedstat") as file:
        waited_ns = int(file.read().split()[1])
    return time.thread_time() + waited_ns / 1e9
