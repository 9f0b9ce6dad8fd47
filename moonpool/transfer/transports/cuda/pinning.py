"""Page-locks segments of other processes that are mapped here, so that a GPU copies from and to them directly.

Page-locking takes about 0.3 s per GiB, so a thread does it in the background, chunk by chunk from the segment's start
on; what lies behind `pinned_nbytes` is copied through pinned slots until then (copy.py). The memory of a dead owner
must not stay locked, because its successor needs it: the thread asks a few times a second whether the owner lives. If
not, no further copy begins, and when the last one has ended, the chunks are released and the mapping goes.

A copy must not cross from one chunk to the next, which are separate registrations for the driver: cut_copies().
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import MoonpoolError, PeerLost
from moonpool.transfer.memory.buffers import address_of
from moonpool.transfer.memory.segment import Borrowed
from moonpool.transfer.transports.cuda.driver import Addresses
from moonpool.transfer.transports.mapped import MappedRemote

_LOG = logging.getLogger(__name__)
CHUNK_NBYTES = 64 * 1024 * 1024  # 17 ms, during which other calls of the driver may have to wait
_PAUSE_RATIO = 2.0  # of the time that a chunk takes, behind each chunk: steps launch their kernels meanwhile
_WATCH_EVERY_S = 0.2
_JOIN_TIMEOUT_S = 5.0


class Registrar(Protocol):
    """The part of driver.Device that is needed here."""

    def register(self, address: int, nbytes: int) -> None: ...
    def unregister(self, address: int) -> None: ...


class DeviceCopies(NamedTuple):
    """Copies between `offsets` of a segment and `addresses` of a GPU."""

    offsets: NDArray[np.int64]
    addresses: Addresses
    sizes: NDArray[np.int64]


def cut_copies(copies: DeviceCopies, chunk_nbytes: int) -> DeviceCopies:
    """Return the same copies, cut where one crosses from a chunk of the segment to the next."""
    offsets, addresses, sizes = copies
    first, last = offsets // chunk_nbytes, (offsets + np.maximum(sizes, 1) - 1) // chunk_nbytes
    num_parts = last - first + 1
    if not len(offsets) or num_parts.max() == 1:
        return copies
    owner = np.repeat(np.arange(len(offsets)), num_parts)
    part = np.arange(len(owner)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    starts = np.maximum(offsets[owner], (first[owner] + part) * chunk_nbytes)
    ends = np.minimum((offsets + sizes)[owner], (first[owner] + part + 1) * chunk_nbytes)
    return DeviceCopies(starts, addresses[owner] + (starts - offsets[owner]).astype(np.uint64), ends - starts)


class PinnedSegment:
    """One mapping of a segment. The first `pinned_nbytes` bytes are page-locked; the number grows."""

    def __init__(self, remote: MappedRemote, borrowed: Borrowed, registrar: Registrar, chunk_nbytes: int) -> None:
        self.remote = remote
        self.chunk_nbytes = chunk_nbytes
        self.address = address_of(borrowed.memory)
        self.pinned_nbytes = 0
        self._borrowed: Borrowed | None = borrowed
        self._registrar = registrar
        self._nbytes = borrowed.memory.nbytes
        self._changed = threading.Condition()
        self._num_copying = 0
        self.is_ending = False
        self.is_refused = False

    def begin_copies(self) -> Borrowed:
        """Return the memory; it stays locked and mapped until end_copies(). Raise PeerLost once the owner is gone."""
        with self._changed:
            if self._borrowed is None or self.is_ending:
                raise PeerLost("the segment's owner is gone")
            self._num_copying += 1
            return self._borrowed

    def end_copies(self) -> None:
        """All copies that were started since begin_copies() are over."""
        with self._changed:
            self._num_copying -= 1
            self._changed.notify_all()

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.begin_copies()
        try:
            yield
        finally:
            self.end_copies()

    # on the thread of Pinning

    def is_current(self) -> bool:
        borrowed = self._borrowed
        return borrowed is not None and self.remote.still_maps(borrowed.memory)

    def grow(self) -> bool:
        """Lock one more chunk. Return False when there is nothing left to lock."""
        start = self.pinned_nbytes
        if self.is_refused or self.is_ending or start >= self._nbytes:
            return False
        end = min(start + self.chunk_nbytes, self._nbytes)
        try:
            self._registrar.register(self.address + start, end - start)
        except MoonpoolError as error:
            self.is_refused = True
            _LOG.warning("only %d bytes of a segment can be page-locked, copies of the rest are slow: %s", start, error)
            return False
        self.pinned_nbytes = end
        return True

    def release(self, timeout_s: float) -> bool:
        """Let no further copy begin; when none is under way, unlock and unmap. Return whether that is done."""
        with self._changed:
            self.is_ending = True
            if not self._changed.wait_for(lambda: self._num_copying == 0, timeout_s):
                return False
        for start in range(0, self.pinned_nbytes, self.chunk_nbytes):
            self._registrar.unregister(self.address + start)
        self.pinned_nbytes = 0
        self._borrowed = None
        return True


class Pinning:
    """All page-locked segments of this process. Thread-safe; the thread starts with the first segment."""

    def __init__(self, registrar: Registrar, *, chunk_nbytes: int = CHUNK_NBYTES) -> None:
        self._registrar = registrar
        self._chunk_nbytes = chunk_nbytes
        self._lock = threading.Lock()
        self._segments: dict[MappedRemote, PinnedSegment] = {}
        self._ending: list[PinnedSegment] = []
        self._woken = threading.Event()
        self._all_locked = threading.Event()
        self._pauses = True
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, remote: MappedRemote, timeout_s: float) -> PinnedSegment:
        """Return the segment as it is mapped now; locking begins with the first call. Raise as a read would, when its
        owner is gone.
        """
        borrowed = remote.borrow(timeout_s)
        with self._lock:
            if self._closed:
                raise PeerLost("the transfer engine is closed")
            found = self._segments.get(remote)
            if found is not None and found.address == address_of(borrowed.memory):
                return found
            if found is not None:
                self._ending.append(found)
            made = PinnedSegment(remote, borrowed, self._registrar, self._chunk_nbytes)
            self._segments[remote] = remote.guard = made
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="page-lock", daemon=True)
                self._thread.start()
        self._woken.set()
        return made

    def hurry(self, timeout_s: float) -> None:
        """Lock without pauses; return when all is locked, or after `timeout_s`."""
        with self._lock:
            if not self._segments:
                return
            self._pauses = False
            self._all_locked.clear()
            self._woken.set()
        self._all_locked.wait(timeout_s)
        self._pauses = True

    def close(self) -> None:
        """Unlock everything, after the copies that are under way. Idempotent."""
        with self._lock:
            self._closed = True
        self._woken.set()
        if self._thread is not None:
            self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._closed:
            self._woken.clear()
            self._retire()
            started_s = time.monotonic()
            has_grown = [each.grow() for each in self._now()]
            if not any(has_grown):
                self._tell_all_locked()
                self._woken.wait(_WATCH_EVERY_S)
            elif self._pauses:
                self._woken.wait(_PAUSE_RATIO * (time.monotonic() - started_s))
        for each in [*self._now(), *self._ending]:
            each.release(_JOIN_TIMEOUT_S)

    def _tell_all_locked(self) -> None:
        with self._lock:
            if not self._woken.is_set():  # else there may be something to lock since
                self._all_locked.set()

    def _now(self) -> list[PinnedSegment]:
        with self._lock:
            return list(self._segments.values())

    def _retire(self) -> None:
        """Release the segments whose owner is gone, or that were mapped again."""
        for each in self._now():
            if not each.is_current():
                with self._lock:
                    if self._segments.get(each.remote) is each:
                        del self._segments[each.remote]
                        each.remote.guard = None
                        self._ending.append(each)
        with self._lock:
            ending = list(self._ending)
        released = [each for each in ending if each.release(0.0)]
        with self._lock:
            self._ending = [each for each in self._ending if each not in released]
