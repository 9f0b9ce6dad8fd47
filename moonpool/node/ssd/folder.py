"""The folder of a log: its owner, its files and their open handles.

    LOCK                 held by the owner
    log-0000000007       a log file; the next one gets the next number
    spare-0000000005     an allocated file outside the log: a released log file, or one made ahead

A log file gets its name when its header is durable. A number is not used again while a file with that number exists.

Open files (`SsdLogFile`) read from any offset into any memory and write whole blocks, with direct I/O where the file
system has it. Otherwise written bytes leave the page cache when they are durable. Thread-safe; a read may run while
another part of the file is written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from moonpool.base.clock import Deadline
from moonpool.base.errors import (
    ConfigError,
    HandleClosed,
    InvalidInput,
    NoSpace,
    NotFound,
    Unavailable,
)
from moonpool.node.ssd.layout import NONCE_NBYTES, UNIT_NBYTES, FileHeader, pack_file_header
from moonpool.transfer.disk.alignment import BUFFERED, Alignment, BouncePool, find_alignment
from moonpool.transfer.disk.disk import BOUNCE_NBYTES, MAX_BOUNCE_BUFFERS, allocate_file, move_blocks, read_spans
from moonpool.transfer.disk.handle import SharedFd, own_errors
from moonpool.transfer.disk.sidecar import sidecar_path
from moonpool.transfer.memory.buffers import aligned_buffer

_NAME = re.compile(r"(log|spare)-([0-9]{10})")
logger = logging.getLogger(__name__)


@contextmanager
def on_disk(path: str) -> Iterator[None]:
    """Map system errors to ours. What would be the caller's mistake elsewhere (read-only, no permission, a missing
    folder) is a failing disk here: Unavailable, so callers try again later. NoSpace stays NoSpace.
    """
    try:
        with own_errors(path):
            yield
    except (InvalidInput, NotFound) as error:
        raise Unavailable(str(error)) from error


class SsdLogFile:
    """Owns its descriptor; borrows the bounce buffers."""

    def __init__(self, path: str, alignment: Alignment, bounces: BouncePool, *, writable: bool) -> None:
        self.path = path
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | (os.O_DIRECT if alignment.direct else 0)
        with on_disk(path):
            self.kept_open = SharedFd(os.open(path, flags), path)
        self._alignment = alignment
        self._bounces = bounces

    def read(self, offset: int, views: Sequence[memoryview], deadline: Deadline) -> None:
        """Fill the views. Unavailable when the file is too short."""
        with on_disk(self.path), self.kept_open as fd:
            read_spans(fd, offset, views, self.path, self._alignment, self._bounces, deadline)

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write whole blocks from aligned memory. There is no deadline: half a batch has no use."""
        with on_disk(self.path), self.kept_open as fd:
            move_blocks(os.pwritev, fd, views, offset, self.path, self._alignment.block_nbytes, None)

    def sync(self) -> None:
        """Return when everything written before is durable."""
        with on_disk(self.path), self.kept_open as fd:
            os.fdatasync(fd)
            if not self._alignment.direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def set_path(self, path: str) -> None:
        """Set the path that error messages name."""
        self.path = self.kept_open.path = path

    def close(self) -> None:
        """Close the file when running calls have ended. Idempotent."""
        self.kept_open.close()


class LogFolder:
    """Thread-safe, except that files are made and retired by one thread at a time."""

    def __init__(self, path: str, file_nbytes: int, max_nbytes: int, max_open_files: int) -> None:
        """ConfigError when another process, or another log of this one, has the folder."""
        self.path = os.path.realpath(path)
        self._file_nbytes = file_nbytes
        self._max_nbytes = max_nbytes
        self._max_open_files = max_open_files
        self._mutex = threading.Lock()
        self._open_files: OrderedDict[int, SsdLogFile] = OrderedDict()
        with on_disk(self.path):
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            self._lock_fd = _lock(os.path.join(self.path, "LOCK"))  # None again after close()
        if self._lock_fd is None:
            raise ConfigError(f"{self.path} is in use by another node; each needs a folder of its own")
        try:
            with on_disk(self.path):
                self.alignment = _probe(os.path.join(self.path, "LOCK"))
                self.sizes, self._spares = self._list()
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._next_number = max((0, *self.sizes, *self._spares)) + 1
        self._bounces = BouncePool(BOUNCE_NBYTES, MAX_BOUNCE_BUFFERS, alignment=UNIT_NBYTES)
        how = "direct I/O" if self.alignment.direct else "no direct I/O on this file system, so through the page cache"
        logger.info("ssd log in %s: %d files, %s", self.path, len(self.sizes), how)

    @property
    def log_nbytes(self) -> int:
        """The size of all log files, without spare files."""
        return sum(self.sizes.values())

    @property
    def num_spares(self) -> int:
        return len(self._spares)

    def path_of(self, number: int) -> str:
        return os.path.join(self.path, f"log-{number:010d}")

    @contextmanager
    def borrow(self, number: int) -> Iterator[SsdLogFile]:
        """Yield the file, open for reading. Unavailable when it does not exist or no descriptor is left, HandleClosed
        after close().
        """
        with contextlib.ExitStack() as stack:
            with self._mutex:
                if self._lock_fd is None:
                    raise HandleClosed(f"the log in {self.path} is closed here")
                file = self._open_files.get(number) or self._open(number)
                self._open_files.move_to_end(number)
                stack.enter_context(file.kept_open)  # under the lock, so that it cannot be closed in between
            yield file

    def open_to_write(self, number: int) -> SsdLogFile:
        """Open a file for writing; the caller closes it."""
        return SsdLogFile(self.path_of(number), self.alignment, self._bounces, writable=True)

    def make_file(self, *, keep_spare: bool) -> tuple[FileHeader, SsdLogFile]:
        """Return a new log file, durable and empty, and a handle to write it. NoSpace when the disk is full. With
        `keep_spare` another spare file must remain: on a full disk compaction moves objects to it.
        """
        spare = self._ensure_spares(2 if keep_spare else 1)
        number = self._take_number()
        header = FileHeader(number, self._file_nbytes, os.urandom(NONCE_NBYTES))
        file = SsdLogFile(self._spare_path(spare), self.alignment, self._bounces, writable=True)
        try:
            file.write(0, [aligned_copy(pack_file_header(header))])
            file.sync()
            with on_disk(self.path):
                os.rename(self._spare_path(spare), self.path_of(number))
                self._sync()
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):  # where the renaming took place
                os.rename(self.path_of(number), self._spare_path(spare))
            raise
        self._spares.discard(spare)
        self.sizes[number] = self._file_nbytes
        file.set_path(self.path_of(number))
        return header, file

    def retire(self, number: int) -> None:
        """Take a file out of the log, durably. It becomes a spare file if there is room for one, else it is removed."""
        path = self.path_of(number)
        with self._mutex:
            file = self._open_files.pop(number, None)
        if file is not None:
            file.close()
        keep = self.sizes[number] == self._file_nbytes and self._spare_nbytes() + self.log_nbytes <= self._max_nbytes
        with on_disk(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(sidecar_path(path))
            with contextlib.suppress(FileNotFoundError):
                if keep:
                    os.rename(path, self._spare_path(number))
                else:
                    os.unlink(path)
            self._sync()
        del self.sizes[number]
        if keep:
            self._spares.add(number)

    def close(self) -> None:
        """Close all files and release the folder's lock. Idempotent."""
        with self._mutex:
            files, self._open_files = list(self._open_files.values()), OrderedDict()
            lock_fd, self._lock_fd = self._lock_fd, None
        for file in files:
            file.close()
        if lock_fd is not None:
            os.close(lock_fd)

    def _open(self, number: int) -> SsdLogFile:
        if number not in self.sizes:
            raise Unavailable(f"{self.path} has no log file {number} any more")
        while len(self._open_files) >= self._max_open_files:
            self._close_oldest()
        try:
            file = SsdLogFile(self.path_of(number), self.alignment, self._bounces, writable=False)
        except Unavailable:
            if not self._open_files:
                raise
            self._close_oldest()  # the process may be out of descriptors; this frees one
            file = SsdLogFile(self.path_of(number), self.alignment, self._bounces, writable=False)
        self._open_files[number] = file
        return file

    def _close_oldest(self) -> None:
        self._open_files.popitem(last=False)[1].close()

    def _spare_path(self, number: int) -> str:
        return os.path.join(self.path, f"spare-{number:010d}")

    def _ensure_spares(self, count: int) -> int:
        """Make spare files until there are `count`. Return the number of one."""
        self._spares = {number for number in self._spares if os.path.exists(self._spare_path(number))}
        while len(self._spares) < count:
            if self.log_nbytes + self._spare_nbytes() + self._file_nbytes > self._max_nbytes:
                raise NoSpace(f"{self.path} has all the files it may have")
            number = self._take_number()
            with on_disk(self._spare_path(number)):
                allocate_file(self._spare_path(number), self._file_nbytes, os.O_TRUNC)
            self._spares.add(number)
        return min(self._spares)

    def _take_number(self) -> int:
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    def _spare_nbytes(self) -> int:
        return len(self._spares) * self._file_nbytes

    def _sync(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _list(self) -> tuple[dict[int, int], set[int]]:
        """Return the sizes of log files, in order, and the numbers of spare files. Remove unusable spare files."""
        found: dict[str, dict[int, os.stat_result]] = {"log": {}, "spare": {}}
        for entry in sorted(os.scandir(self.path), key=lambda entry: entry.name):
            if match := _NAME.fullmatch(entry.name):
                found[match[1]][int(match[2])] = entry.stat()
        sizes = {number: status.st_size for number, status in found["log"].items()}
        spares: set[int] = set()
        for number, status in found["spare"].items():
            whole = status.st_size == self._file_nbytes <= status.st_blocks * 512
            if whole and sum(sizes.values()) + (len(spares) + 1) * self._file_nbytes <= self._max_nbytes:
                spares.add(number)
            else:
                with contextlib.suppress(OSError):  # a read-only disk keeps the file; it is not used
                    os.unlink(self._spare_path(number))
        return sizes, spares


def aligned_copy(data: bytes) -> memoryview:
    """Copy whole blocks to memory that direct I/O can write."""
    copy = aligned_buffer(len(data), UNIT_NBYTES)
    copy[:] = data
    return copy


def _lock(path: str) -> int | None:
    """Return the lock's descriptor; None when another process holds it. Opened for reading only: a log on a read-only
    disk can still be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _probe(path: str) -> Alignment:
    """Return how files of this folder are read and written. A disk with blocks of more than 4 KiB is used through the
    page cache: a direct write must not touch a neighbour's block.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return BUFFERED
    try:
        alignment = find_alignment(fd)
    finally:
        os.close(fd)
    fits = UNIT_NBYTES % alignment.block_nbytes == 0 and UNIT_NBYTES % alignment.memory_nbytes == 0
    return alignment if fits else BUFFERED
