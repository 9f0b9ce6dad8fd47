"""An open file that threads share, the mapping of its system errors to ours, and locks on ranges of it.

Locks belong to an open file description: they exclude other processes and other handles of this process, but not
threads of one handle. The kernel releases them when the process ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from moonpool.base.clock import Deadline
from moonpool.base.errors import DeadlineExceeded, InvalidInput, MoonpoolError, NoSpace, NotFound, PeerLost, Unavailable

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NOT_FOUND = frozenset({errno.ENOENT, errno.ENOTDIR})
_NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.EBUSY, errno.ENAMETOOLONG})
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_UNLOCKED = struct.pack("h", fcntl.F_UNLCK)
_LOCK_POLL_S = 0.001


class SharedFd:
    """Owns a descriptor. `with shared as fd:` keeps it open until the block ends and maps system errors of the block to
    ours. close() takes effect when the last user is done, so that no thread uses a number that the kernel has given to
    another file meanwhile.
    """

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        self._fd = fd
        self._lock = threading.Lock()
        self._num_users = 0
        self._closed = False

    def __enter__(self) -> int:
        """Raise PeerLost after close()."""
        with self._lock:
            if self._closed:
                raise PeerLost(f"{self.path} is closed here")
            self._num_users += 1
        return self._fd

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with self._lock:
            self._num_users -= 1
            self._close_if_unused()
        if isinstance(error, OSError):
            raise _own_error(error, self.path) from error

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._closed and self._num_users == 0:
            os.close(self._fd)


@contextmanager
def own_errors(path: str) -> Iterator[None]:
    """Map system errors to ours; the messages name `path`."""
    try:
        yield
    except OSError as error:
        raise _own_error(error, path) from error


def _own_error(error: OSError, path: str) -> MoonpoolError:
    text = f"{path}: {error.strerror or error}"
    if error.errno in _NO_SPACE:
        return NoSpace(text)
    if error.errno in _NOT_FOUND:
        return NotFound(text)
    if error.errno in _NOT_ALLOWED:
        return InvalidInput(text)
    return Unavailable(text)  # EIO, a device that went away, a stale mount


def try_lock(fd: int, start: int, nbytes: int) -> bool:
    """Lock a range for this handle alone. Return False if another handle holds part of it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, nbytes, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def lock(fd: int, start: int, nbytes: int, deadline: Deadline) -> None:
    """Wait for the range by polling: the blocking call has no deadline, and the process that has it may be stopped."""
    while not try_lock(fd, start, nbytes):
        if deadline.expired():
            raise DeadlineExceeded(f"another process holds bytes {start} to {start + nbytes} of the file")
        time.sleep(_LOCK_POLL_S)


def unlock(fd: int, start: int, nbytes: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, nbytes, 0))


def is_locked_elsewhere(fd: int, start: int, nbytes: int) -> bool:
    """Return whether another handle, here or in another process, holds part of the range."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, nbytes, 0)
    return not fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked).startswith(_UNLOCKED)
