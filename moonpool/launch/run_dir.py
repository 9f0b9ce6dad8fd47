"""The run directory of one launcher: private, with a short name, removed when the launcher ends.

It holds the Unix sockets of the roles. Its owner holds a lock on a file inside; the kernel drops the lock however the
owner ends, so a directory whose lock can be taken is stale, and the next launcher removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from moonpool.base.address import UNIX_PATH_NBYTES
from moonpool.base.errors import ConfigError
from moonpool.base.run_dirs import LOCK, PREFIX, base_dir, is_stale, own_dirs

_LONGEST_SOCKET_NAME_NBYTES = 32


class RunDir:
    """Owns `path` (mode 0700) from creation to close()."""

    def __init__(self, base: Path | None = None) -> None:
        base = base or base_dir()
        sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        self._lock_fd: int | None = None
        try:
            self._check_length()
            self._lock_fd = _make_lock(self.path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the directory. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _check_length(self) -> None:
        if len(os.fsencode(self.path)) + _LONGEST_SOCKET_NAME_NBYTES >= UNIX_PATH_NBYTES:
            raise ConfigError(
                f"{self.path} is too long for Unix sockets; set XDG_RUNTIME_DIR or TMPDIR to a short path"
            )

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def sweep(base: Path) -> list[Path]:
    """Remove the directories of this user's killed launchers; return their paths."""
    stale = [path for path in own_dirs(base) if is_stale(path)]
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)
    return stale


def _make_lock(directory: Path) -> int:
    """Create the lock file: lock it first and rename it then, so that no process ever finds it unlocked."""
    unnamed = directory / (LOCK + ".new")
    fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(unnamed, directory / LOCK)
    return fd
