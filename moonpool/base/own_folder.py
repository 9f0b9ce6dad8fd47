"""A folder of one process: private, and removed when it is closed, when its process ends, or, after `kill -9`, by the
next process that makes one of its kind.

The owner holds a lock on a file inside. The kernel drops the lock however the owner ends, so a folder whose lock can be
taken is stale.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from pathlib import Path
from types import TracebackType

_LOCK = "owner.lock"
# A folder without a lock file is one that is being made, unless it is older than this.
_YOUNG_S = 60.0


class OwnFolder:
    """Owns `path` (mode 0700) from creation to close(). `prefix` is its kind: folders of this user with the same prefix
    that are stale are removed at creation."""

    def __init__(self, prefix: str, base: Path | None = None) -> None:
        base = base or Path(tempfile.gettempdir())
        sweep(base, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        try:
            fd = _make_lock(self.path)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        self._own(fd)

    def _own(self, fd: int) -> None:
        self._lock_fd = fd
        self._remove = weakref.finalize(self, _remove, self.path, fd, os.getpid())

    def own_again(self) -> bool:
        """Make the folder again if it, or the lock in it, was removed. Return whether it was. Raise OSError: also if a
        folder is there now that another user, or another process, owns."""
        if self._is_locked():
            return False
        self.path.mkdir(mode=0o700, exist_ok=True)
        info = self.path.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "another user has made it", str(self.path))
        if is_owned(self.path):
            raise FileExistsError(errno.EEXIST, "another process has made it", str(self.path))
        self.path.chmod(0o700)
        fd = _make_lock(self.path)
        self._remove.detach()
        os.close(self._lock_fd)
        self._own(fd)
        return True

    def _is_locked(self) -> bool:
        try:
            return os.path.samestat((self.path / _LOCK).lstat(), os.fstat(self._lock_fd))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def close(self) -> None:
        """Remove the folder. Idempotent."""
        self._remove()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def sweep(base: Path, prefix: str) -> list[Path]:
    """Remove the folders of that kind that killed processes of this user have left; return their paths."""
    stale = [path for path in own_folders(base, prefix) if is_stale(path)]
    for path in stale:
        shutil.rmtree(path, ignore_errors=True)
    return stale


def own_folders(base: Path, prefix: str) -> list[Path]:
    """Return this user's folders of that kind, live and stale."""
    found = []
    for path in sorted(base.glob(prefix + "*")):
        try:
            info = path.lstat()
        except FileNotFoundError:
            continue  # its owner removed it meanwhile
        if path.is_dir() and not path.is_symlink() and info.st_uid == os.getuid():
            found.append(path)
    return found


def is_stale(folder: Path) -> bool:
    """Return whether the process that made the folder has ended."""
    try:
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return _age_s(folder) > _YOUNG_S
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def is_owned(folder: Path) -> bool:
    """Return whether a process owns the folder now."""
    return (folder / _LOCK).exists() and not is_stale(folder)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _make_lock(folder: Path) -> int:
    """Create the lock file: lock it first and rename it then, so that no process ever finds it unlocked."""
    unnamed = folder / (_LOCK + ".new")
    fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(unnamed, folder / _LOCK)
    return fd


def _remove(path: Path, lock_fd: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # not a process that was forked from the owner
        shutil.rmtree(path, ignore_errors=True)
    os.close(lock_fd)
