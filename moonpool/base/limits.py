"""What this process may use of its machine: the limits of its container, its memory, its disks, its CPU cores.

Memory: memory_shortage() recognizes errors that mean that memory, address space (`ulimit -v`) or threads have run out.
Libraries raise these as MemoryError, OSError, ImportError and RuntimeError alike; the user reads one line and not a
traceback.

Cores: threads that outnumber the cores cost far more than they compute, because each parallel region waits for its
slowest thread. `moonpool serve` knows its workers and divides the cores among them (`divide_cores`). Workers that are
started by hand do not know each other; each holds a `CorePresence` and counts those of the others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from moonpool.base.errors import ConfigError, NoSpace
from moonpool.base.units import format_nbytes

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
LEAST_ADDRESS_NBYTES = 256_000_000
# Texts by which C libraries, the dynamic loader, torch and CUDA say that memory has run out.
_TEXTS = ("cannot allocate memory", "can't allocate memory", "out of memory", "failed to map segment", "unable to map")
_NO_THREAD = "can't start new thread"
_SOCKET_PREFIX = "moonpool-worker-cores"
_LISTED = re.compile(rf"@{_SOCKET_PREFIX}/(\d+)/([0-9a-f]+)")


class ControlGroup(NamedTuple):
    """One group around this process. Version 1 has a tree per controller and other file names than version 2."""

    folder: Path
    version: int


def control_groups(controller: str, proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[ControlGroup]:
    """Yield every group around this process that may limit `controller`, the innermost first."""
    for line in read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controllers
        here = root / path.lstrip("/")
        for folder in (here, *here.parents):
            yield ControlGroup(folder, 1 if controllers else 2)
            if folder == root:
                break


def read_text(path: Path) -> str:
    """Return the file's text, or "" if there is no such file: not every machine has every kind of control group."""
    try:
        return path.read_text()
    except OSError:
        return ""


def address_space_nbytes() -> int | None:
    """Return how much address space this process and its children may take; None if there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def require_disk(folder: Path, nbytes_each: int, num_nodes: int = 1) -> None:
    """Raise ConfigError if the disk of the folder, which need not exist yet, is smaller than the SSD tiers of so many
    nodes. A disk that is large enough but full is no error: it may have room later. Nor is one that does not answer."""
    try:
        info = os.statvfs(next(each for each in (folder, *folder.parents) if each.exists()))
    except OSError:
        return
    disk_nbytes, free_nbytes = info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize
    if 0 < disk_nbytes < num_nodes * nbytes_each:  # a file system that does not say its size has 0
        wanted = format_nbytes(nbytes_each) + (f" for each of {num_nodes} nodes" if num_nodes > 1 else "")
        has = f"{format_nbytes(disk_nbytes)} in all, {format_nbytes(free_nbytes)} of them free"
        raise ConfigError(
            f"--ssd-size is {wanted}, and the disk of {folder} has {has}; choose a smaller --ssd-size, or a folder on "
            "another disk (--ssd)",
            param="ssd_size",
        )


def require_address_space_to_start() -> None:
    """Raise NoSpace when `ulimit -v` allows less than numpy needs: its libraries would end the process."""
    limit = address_space_nbytes()
    if limit is not None and limit < LEAST_ADDRESS_NBYTES:
        least = format_nbytes(LEAST_ADDRESS_NBYTES)
        raise NoSpace(
            f"`ulimit -v` allows {format_nbytes(limit)} of address space, every command needs {least}; raise it"
        )


def memory_shortage(error: BaseException) -> str | None:
    """Return what ran out and what to do about it, in one line; None if the error has another cause."""
    found = [each for each in _chain(error) if _is_shortage(each)]
    if not found:
        return None
    text = " ".join(str(found[-1]).split())[:200] or type(found[-1]).__name__  # the first that was raised
    limit = address_space_nbytes()
    if limit is not None:
        return f"not enough memory ({text}): `ulimit -v` allows this process {format_nbytes(limit)}; raise it"
    if _NO_THREAD in text:
        return f"no more threads ({text}): raise `ulimit -u`, or the container's limit of processes"
    return f"not enough memory ({text}): close other programs, or ask for less"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and the errors that it was raised from or during."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error).lower()
    if isinstance(error, RuntimeError) and _NO_THREAD in text:
        return True
    return isinstance(error, (ImportError, RuntimeError)) and any(each in text for each in _TEXTS)


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
