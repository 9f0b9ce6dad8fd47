"""Finding the services that run on this machine: each keeps its Unix sockets in a run directory of its own.

A launcher keeps a lock on a file in its directory for as long as it lives; the kernel drops the lock however the
launcher ends. So a directory whose lock can be taken is stale.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from pathlib import Path

PREFIX = "moonpool-"
LOCK = "owner.lock"
MASTER = "master"  # the role's name, and so its socket's
# A directory without a lock file is one that is being made, unless it is older than this.
_YOUNG_S = 60.0


def base_dir() -> Path:
    """Where run directories live: the user's runtime directory, else the system's one for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path(tempfile.gettempdir())


def socket_address(run_dir: Path, name: str) -> str:
    """Where the role of that name serves; the same after a restart."""
    return f"unix:{run_dir / name}.sock"


def live_run_dirs(base: Path | None = None) -> list[Path]:
    """Run directories of this user whose launcher is alive."""
    return [path for path in own_dirs(base or base_dir()) if (path / LOCK).exists() and not is_stale(path)]


def own_dirs(base: Path) -> list[Path]:
    """This user's, live and stale."""
    found = []
    for path in sorted(base.glob(PREFIX + "*")):
        try:
            info = path.lstat()
        except FileNotFoundError:
            continue  # its owner removed it meanwhile
        if path.is_dir() and not path.is_symlink() and info.st_uid == os.getuid():
            found.append(path)
    return found


def is_stale(directory: Path) -> bool:
    """Whether the launcher that made it is gone."""
    try:
        fd = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return _age_s(directory) > _YOUNG_S
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
