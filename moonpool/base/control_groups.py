"""The Linux control groups around this process: where the limits of a container are written. Reads files only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


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
