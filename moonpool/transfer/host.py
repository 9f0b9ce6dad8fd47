"""What the transfer engine must know about the machine it runs on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@cache
def host_id() -> str:
    """Names the running kernel: equal for all processes that could share memory, containers included.

    Whether two of them really can is decided by the Unix socket: its path must exist on the other side too.
    """
    return _BOOT_ID.read_text().strip()


def available_memory_nbytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Memory this process could still take without being killed: the machine's, or its cgroup's if that is less."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    machine = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _cgroup_headroom_nbytes(cgroup)
    return machine if limit is None else min(machine, limit)


def _cgroup_headroom_nbytes(cgroup: Path) -> int | None:
    """None without a cgroup v2 limit. Cached file pages count as free: the kernel drops them first."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
