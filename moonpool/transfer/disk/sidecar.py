"""PATH.fence, beside each file that is served: its sizes, its grant and its generations. Mapped by all users.

Layout, little-endian:
    0     magic, version u32, reserved u32, nbytes u64, granule_nbytes u64 (0: no fence)
    64    grant: served u8, name length u16, incarnation u64, name
    4096  one u64 generation per granule
The process that serves the file holds a lock on byte 0. The kernel releases it when that process ends, so a grant
without the lock belongs to an owner that is gone. If the file is lost (it may be in /dev), only generations of writers
that are gone are lost.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import uuid

import numpy as np

from moonpool.base.errors import AlreadyExists, Corrupt, InvalidInput, NotFound, PeerLost
from moonpool.transfer.disk.handle import SharedFd, is_locked_elsewhere, own_errors, try_lock, unlock
from moonpool.transfer.memory.fence import Fence, num_granules

_MAGIC = b"MOONFILE"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQ")
_GRANT = struct.Struct("<BxH4xQ256s")
_GRANT_AT = 64
_TABLE_AT = 4096
_MAX_U64 = 2**64 - 1
_OWNER_BYTE = (0, 1)  # start and length of the lock


def sidecar_path(path: str) -> str:
    return f"{path}.fence"


class Sidecar:
    """One process's mapping of it. Make one with create() or open()."""

    def __init__(self, fd: int, path: str, *, writable: bool = True) -> None:
        """Own the descriptor from the return on; if this raises, the caller still owns it."""
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        with own_errors(path):
            whole = memoryview(mmap.mmap(fd, os.fstat(fd).st_size, prot=protection))
        self.nbytes, self.granule_nbytes = _read_header(whole, path)
        self.fence: Fence | None = None
        if self.granule_nbytes is not None:
            count = num_granules(self.nbytes, self.granule_nbytes)
            table = np.frombuffer(whole, dtype=np.uint64, count=count, offset=_TABLE_AT)
            self.fence = Fence(table, self.granule_nbytes)
        self._path = path
        self._fd = SharedFd(fd, path)
        self._grant: memoryview | None = whole[_GRANT_AT : _GRANT_AT + _GRANT.size]
        self._lock = threading.Lock()
        self._serving = False

    @classmethod
    def create(cls, path: str, nbytes: int, granule_nbytes: int | None) -> Sidecar:
        """Make a new one for the file at `path`, atomically. Raise AlreadyExists if a living process serves the present
        one.
        """
        target = sidecar_path(path)
        with contextlib.suppress(NotFound, Corrupt):
            _refuse_if_served(cls.open(path))
        draft = f"{target}.{uuid.uuid4().hex[:8]}"
        with own_errors(target):
            try:
                _write_draft(draft, nbytes, granule_nbytes)
                os.replace(draft, target)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(draft)
        return cls.open(path)

    @classmethod
    def open(cls, path: str, *, writable: bool = True) -> Sidecar:
        """Map the sidecar of the file at `path`. A reader passes `writable=False`, which works on a read-only disk too.

        Raise NotFound if there is none, Corrupt if it is not in this module's format.
        """
        target = sidecar_path(path)
        with own_errors(target):
            fd = os.open(target, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < _TABLE_AT:
                raise Corrupt(f"{target} is truncated")
            return cls(fd, target, writable=writable)
        except BaseException:
            os.close(fd)
            raise

    def serve(self, name: str, incarnation: int) -> None:
        """Let others use the file. Raise AlreadyExists if another process serves it."""
        with self._lock, self._fd as fd:
            if self._serving or not try_lock(fd, *_OWNER_BYTE):
                raise AlreadyExists(f"{self._path} is already served")
            self._serving = True
            wanted, grant = pack_grant(name, incarnation), self._mapped_grant()
            grant[0] = 0  # not valid while it changes
            grant[1:] = wanted[1:]
            grant[0] = wanted[0]

    def withdraw(self) -> None:
        """End the grant: others find that the file is not served. Idempotent, also after close()."""
        with self._lock:
            if self._serving:
                self._mapped_grant()[0] = 0
                self._release()

    def abandon(self) -> None:
        """Release the lock and leave the grant: others find that the owner is gone. Idempotent, also after close()."""
        with self._lock:
            if self._serving:
                self._release()

    def check(self, grant: bytes) -> None:
        """Raise NotFound if this is not the present grant, PeerLost if its owner is gone."""
        found = bytes(self._mapped_grant())
        if found != grant:
            raise _not_granted(found, grant, self._path)
        if not self.has_owner():
            raise PeerLost(f"the owner of {self._path} is gone")

    def has_owner(self) -> bool:
        """Return whether another handle, here or in another process, serves the file."""
        with self._fd as fd:
            return is_locked_elsewhere(fd, *_OWNER_BYTE)

    def close(self) -> None:
        """Abandon the grant and close the file. Idempotent. The mapping ends with the last user of the fence."""
        self.abandon()
        self.fence = self._grant = None
        self._fd.close()

    def _mapped_grant(self) -> memoryview:
        grant = self._grant
        if grant is None:
            raise PeerLost(f"{self._path} is closed here")
        return grant

    def _release(self) -> None:
        self._serving = False
        with self._fd as fd:
            unlock(fd, *_OWNER_BYTE)


def pack_grant(name: str, incarnation: int) -> bytes:
    if not 0 <= incarnation <= _MAX_U64:
        raise InvalidInput(f"incarnation {incarnation} is not an unsigned 64-bit number")
    text = name.encode()
    return _GRANT.pack(1, len(text), incarnation, text)


def _refuse_if_served(sidecar: Sidecar) -> None:
    try:
        if sidecar.has_owner():
            raise AlreadyExists("a living process serves this device or file")
    finally:
        sidecar.close()


def _not_granted(found: bytes, wanted: bytes, path: str) -> NotFound:
    served, name_nbytes, incarnation, name = _GRANT.unpack(found)
    _, wanted_nbytes, wanted_incarnation, wanted_name = _GRANT.unpack(wanted)
    if not served or name[:name_nbytes] != wanted_name[:wanted_nbytes]:
        return NotFound(f"no segment {wanted_name[:wanted_nbytes].decode()!r} is served at {path}")
    return NotFound(f"{path} is of incarnation {incarnation} now, {wanted_incarnation} is gone")


def _file_nbytes(nbytes: int, granule_nbytes: int | None) -> int:
    return _TABLE_AT + (0 if granule_nbytes is None else 8 * num_granules(nbytes, granule_nbytes))


def _write_draft(draft: str, nbytes: int, granule_nbytes: int | None) -> None:
    fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Allocate every page now: to touch a page for which the disk has no space would kill the process.
        os.posix_fallocate(fd, 0, _file_nbytes(nbytes, granule_nbytes))
        os.pwrite(fd, _HEADER.pack(_MAGIC, _VERSION, 0, nbytes, granule_nbytes or 0), 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_header(whole: memoryview, path: str) -> tuple[int, int | None]:
    magic, version, _, nbytes, granule = _HEADER.unpack_from(whole)
    if magic != _MAGIC or version != _VERSION:
        raise Corrupt(f"{path} is not a fence of this version of Moonpool; remove it to start over")
    granule_nbytes = granule or None
    if nbytes == 0 or whole.nbytes < _file_nbytes(nbytes, granule_nbytes):
        raise Corrupt(f"{path} is truncated")
    return nbytes, granule_nbytes
