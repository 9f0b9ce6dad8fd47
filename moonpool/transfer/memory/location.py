"""Where memory lies: on which machine, and there "cpu:0", "cpu", "cuda:0" or "ssd:/path".

The topology's matrix uses the same words.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from moonpool.base.errors import ConfigError

Kind = Literal["cpu", "cuda", "ssd"]
_KINDS: tuple[Kind, ...] = get_args(Kind)
_INDEX = re.compile(r"0|[1-9][0-9]{0,4}", re.ASCII)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Location:
    """`index` is the NUMA node or the GPU; None: memory of this machine, node unknown. `path` is for "ssd" only."""

    kind: Kind
    index: int | None = None
    path: str | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"{self.kind}:{self.path}"
        return self.kind if self.index is None else f"{self.kind}:{self.index}"


def parse_location(text: str) -> Location:
    """Parse one of the four forms; ConfigError, with the expected form, for any other text."""
    kind, colon, rest = text.partition(":")
    if kind == "ssd" and os.path.isabs(rest) and rest.isprintable():
        return Location("ssd", path=rest)
    if kind == "cpu" and not colon:
        return Location("cpu")
    if kind in ("cpu", "cuda") and _INDEX.fullmatch(rest):
        return Location("cpu" if kind == "cpu" else "cuda", int(rest))
    raise ConfigError(f"{text!r} is no memory location; say {_expected(kind)}")


def _expected(kind: str) -> str:
    forms = {"cpu": '"cpu" or "cpu:<NUMA node>"', "cuda": '"cuda:<GPU>"', "ssd": '"ssd:/absolute/path"'}
    return forms.get(kind) or ", ".join(forms[known] for known in _KINDS)


@cache
def host_id() -> str:
    """Return the id of the running kernel: equal for all processes that could share memory, containers included.

    Two such processes can share memory if both see the path of the Unix socket.
    """
    return _BOOT_ID.read_text().strip()


def available_memory_nbytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return how much memory this process can take without being killed: the machine's, or its cgroup's if less."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    machine = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _cgroup_headroom_nbytes(cgroup)
    return machine if limit is None else min(machine, limit)


def _cgroup_headroom_nbytes(cgroup: Path) -> int | None:
    """Return None without a cgroup v2 limit. Cached file pages count as free: the kernel drops them first."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))
