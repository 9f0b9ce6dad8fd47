"""The run directory of one launcher: private, short-named, gone when the launcher is gone.

It holds the roles' Unix sockets. Its owner keeps a lock on a file inside for as long as it lives; the kernel drops
the lock however the owner ends, so a directory whose lock can be taken is stale and the next launcher sweeps it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType

from moonpool.base.address import UNIX_PATH_NBYTES
from moonpool.base.errors import ConfigError

_PREFIX = "moonpool-"
_LOCK = "owner.lock"
# A directory without a lock file is one that is being made, unless it is older than this.
_YOUNG_S = 60.0
_LONGEST_SOCKET_NAME_NBYTES = 32


def base_dir() -> Path:
    """Where run directories live: the user's runtime directory, else the system's one for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) if runtime and os.access(runtime, os.W_OK) else Path(tempfile.gettempdir())


class RunDir:
    """Owns `path` (mode 0700) from creation to close()."""

    def __init__(self, base: Path | None = None) -> None:
        base = base or base_dir()
        sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._lock_fd: int | None = None
        try:
            self._check_length()
            self._lock_fd = _make_lock(self.path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Removes the directory. Idempotent."""
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
    """Removes what killed launchers of this user left behind; returns the removed paths."""
    stale = [path for path in _own_dirs(base) if _is_stale(path)]
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)
    return stale


def live_run_dirs(base: Path | None = None) -> list[Path]:
    """Run directories of this user whose launcher is alive."""
    base = base or base_dir()
    return [path for path in _own_dirs(base) if (path / _LOCK).exists() and not _is_stale(path)]


def _own_dirs(base: Path) -> list[Path]:
    found = []
    for path in sorted(base.glob(_PREFIX + "*")):
        try:
            info = path.lstat()
        except FileNotFoundError:
            continue  # its owner removed it meanwhile
        if path.is_dir() and not path.is_symlink() and info.st_uid == os.getuid():
            found.append(path)
    return found


def _make_lock(directory: Path) -> int:
    """Locked first and named afterwards, so that nobody ever finds it unlocked while we live."""
    unnamed = directory / (_LOCK + ".new")
    fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(unnamed, directory / _LOCK)
    return fd


def _is_stale(directory: Path) -> bool:
    try:
        fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
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
