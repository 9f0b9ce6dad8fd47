"""CPU cores: how many this process may use, and how workers of one machine share them.

Threads that outnumber the cores cost far more than they compute: each parallel region waits for its slowest thread.
`moonpool serve` knows its workers and divides the cores among them (`divide_cores`). Workers that are started by hand
do not know each other; each holds a `CorePresence` and counts those of the others.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from moonpool.base.control_groups import CGROUPS, PROC, control_groups, read_text

_SOCKET_PREFIX = "moonpool-worker-cores"
_LISTED = re.compile(rf"@{_SOCKET_PREFIX}/(\d+)/([0-9a-f]+)")


def available_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the number of cores this process may use: its CPU affinity, or a container's quota if that is less."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(proc, cgroups)]))


def divide_cores(num_cores: int, num_workers: int) -> list[int]:
    """Return how many threads each worker gets: at least one, and the first ones one more where cores are left."""
    share, left = divmod(num_cores, num_workers)
    return [max(1, share + (index < left)) for index in range(num_workers)]


def _quotas(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the limit of each control group that has one, in whole cores, rounded up."""
    for folder, version in control_groups("cpu", proc, cgroups):
        if version == 2:
            words = read_text(folder / "cpu.max").split()
        else:
            words = [read_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            yield -(-int(words[0]) // int(words[1]))


class CorePresence:
    """Tells other workers of this machine that this process computes here, until it is closed or the process ends.

    The sign is an abstract Unix socket whose name holds the process id and the CPU affinity; the kernel removes it
    with the process. Workers whose affinities share no core do not count each other.
    """

    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._mask = sum(1 << core for core in os.sched_getaffinity(0))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):  # without the sign others count one worker less
            self._socket.bind(f"\0{_SOCKET_PREFIX}/{os.getpid()}/{self._mask:x}")

    def num_workers(self) -> int:
        """Return how many workers compute on these cores, this process included."""
        listed = dict(_LISTED.findall(read_text(self._proc / "net" / "unix")))
        others = {pid for pid, mask in listed.items() if int(mask, 16) & self._mask}
        return len(others | {str(os.getpid())})

    def num_threads(self) -> int:
        """Return this worker's part of the available cores."""
        return max(1, available_cores(self._proc, self._cgroups) // self.num_workers())

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def __enter__(self) -> CorePresence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
