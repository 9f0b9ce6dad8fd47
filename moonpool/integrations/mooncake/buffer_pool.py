"""`BufferPool`: registered memory to read into and put from, lent out piece by piece and used again.

Registering memory takes longer than using a small piece of it. So a region stays registered when its lease ends, and
the next acquire() of its size class takes it. Size classes are the powers of two from `min_size_class` to
`max_size_class`; larger requests get regions of their own size. All regions together stay below `max_bytes`: free ones
of other sizes are given up when a request would not fit otherwise.

Errors are RuntimeErrors, as upstream's are. Thread-safe. Leases that are dropped without release() end when the last
view of their memory is gone.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.transfer.memory.buffers import address_of, aligned_buffer

_DEFAULT_ALIGNMENT = 8 * 1024 * 1024
_DEFAULT_MIN_CLASS = 64 * 1024
_MIN_ALIGNMENT = 4096


class _Exhausted(RuntimeError):
    """Everything is lent, and the caller does not wait."""


class PoolStore(Protocol):
    """The part of a store that a pool uses."""

    def local_buffer_nbytes(self) -> int: ...
    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...
    def unregister_buffer(self, buffer_ptr: int) -> int: ...


@dataclass(frozen=True, eq=False)
class Region:
    """Registered memory."""

    memory: memoryview
    address: int

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes


class BufferLeaseView(np.ndarray[Any, np.dtype[np.uint8]]):
    """The memory behind a view of a lease. It keeps the lease, so the memory is not lent again while a view exists."""

    lease: BufferLease


class BufferLease:
    """Memory lent by a pool until release(), or the end of a with block."""

    def __init__(self, pool: BufferPool, region: Region, size: int) -> None:
        self._region: Region | None = region
        self._size = size
        self._views: list[weakref.ref[BufferLeaseView]] = []
        self._finalizer = weakref.finalize(self, pool._give_back, region)
        self._finalizer.atexit = False

    @property
    def ptr(self) -> int:
        return self._open().address

    @property
    def size(self) -> int:
        """The size that was asked for."""
        return self._size

    @property
    def buffer(self) -> memoryview:
        """A writable view of the memory. release() is refused while it, or a slice of it, exists."""
        array = np.frombuffer(self._open().memory, np.uint8, self._size).view(BufferLeaseView)
        array.lease = self
        self._views = [view for view in self._views if view() is not None]
        self._views.append(weakref.ref(array))
        return array.data

    def release(self) -> None:
        """Give the memory back. Idempotent. RuntimeError while views of it exist."""
        if self._region is None:
            return
        if any(view() is not None for view in self._views):
            raise RuntimeError("cannot release buffer while exported views exist")
        self._region = None
        self._finalizer()

    def __enter__(self) -> BufferLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _open(self) -> Region:
        if self._region is None:
            raise RuntimeError("buffer lease is closed")
        return self._region


class BufferPool:
    """Lends memory that is registered with `store`.

    `max_bytes` is at least the store's local_buffer_size; 0 means twice that. acquire() waits for memory, at most
    `default_timeout` seconds, unless `block_on_exhaustion` is False. `max_regions` limits the leases at one time.
    Regions smaller than `alignment` are aligned to their own size.
    """

    def __init__(
        self,
        store: PoolStore,
        max_bytes: int = 0,
        min_size_class: int = _DEFAULT_MIN_CLASS,
        max_size_class: int | None = None,
        alignment: int = _DEFAULT_ALIGNMENT,
        block_on_exhaustion: bool = True,
        default_timeout: float | None = None,
        max_regions: int | None = None,
        prewarm_size: int | None = None,
        prewarm_count: int = 0,
    ) -> None:
        if not hasattr(store, "local_buffer_nbytes"):
            raise RuntimeError("BufferPool takes a MooncakeDistributedStore")
        local_nbytes = store.local_buffer_nbytes()
        if local_nbytes < 0:
            raise RuntimeError("MooncakeDistributedStore is not initialized")
        if not local_nbytes:
            raise RuntimeError("BufferPool requires a store configured with a local buffer")
        if min_size_class <= 0 or alignment < 8 or alignment & (alignment - 1):
            raise RuntimeError("min_size_class must be positive, alignment a power of two and at least 8")
        self._store = store
        self._max_nbytes = max(max_bytes, local_nbytes) if max_bytes else 2 * local_nbytes
        self._min_class = min_size_class
        self._max_class = self._max_nbytes if max_size_class is None else max_size_class
        self._alignment = alignment
        self._blocks, self._timeout_s, self._max_regions = block_on_exhaustion, default_timeout, max_regions
        # The garbage collector ends leases, also in a thread that holds this lock: so it is reentrant, and ended leases
        # wait in a queue until a call is at a point where it can take them over.
        self._changed = threading.Condition(threading.RLock())
        self._returned: deque[Region] = deque()
        self._free: list[Region] = []
        self._lent: set[Region] = set()
        self._reserved_nbytes = 0  # of regions that are being registered
        self._num_reserved = 0
        self._is_closed = False
        if prewarm_size is not None:
            self.prewarm(prewarm_size, prewarm_count)

    def acquire(self, size: int, block: bool | None = None, timeout: float | None = None) -> BufferLease:
        """Lend `size` bytes. RuntimeError when the pool can never lend so much, has nothing left (`block` False), or
        got nothing back in `timeout` seconds.
        """
        timeout_s = self._timeout_s if timeout is None else timeout
        if timeout_s is not None and timeout_s < 0:
            raise RuntimeError("timeout must be non-negative")
        if not 0 <= size <= self._max_nbytes:
            raise RuntimeError("requested buffer size exceeds pool capacity")
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        waits = self._blocks if block is None else block
        return BufferLease(self, self._take(self._class_nbytes(size), waits, deadline_s), size)

    def buffer(self, size: int, block: bool | None = None, timeout: float | None = None) -> BufferLease:
        """acquire(), for a with block."""
        return self.acquire(size, block, timeout)

    def prewarm(self, size: int, count: int) -> None:
        """Register `count` regions for leases of `size` bytes ahead, as far as max_bytes and max_regions allow."""
        leases: list[BufferLease] = []
        with suppress(_Exhausted):
            while len(leases) < count:
                leases.append(self.acquire(size, block=False))
        for lease in leases:
            lease.release()

    def close(self) -> None:
        """Unregister all memory. Idempotent. RuntimeError while a lease exists."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_reserved)
            self._collect()
            if self._lent:
                raise RuntimeError("cannot close buffer pool with active leases")
            self._is_closed = True
            unused, self._free = self._free, []
            self._changed.notify_all()
        self._drop(unused)

    def _take(self, nbytes: int, waits: bool, deadline_s: float | None) -> Region:
        with self._changed:
            region, unused = self._try_take(nbytes)
            while region is None and unused is None:
                self._wait(waits, deadline_s)
                region, unused = self._try_take(nbytes)
        if region is not None:
            return region
        self._drop(unused or [])
        return self._register(nbytes)

    def _try_take(self, nbytes: int) -> tuple[Region | None, list[Region] | None]:
        """Return a free region; or which free ones to drop before a new one is registered, whose place is reserved now;
        or two times None when everything is lent. The lock is held.
        """
        if self._is_closed:
            raise RuntimeError("buffer pool is closed")
        self._collect()
        num_lent = len(self._lent) + self._num_reserved
        if self._max_regions is not None and num_lent >= self._max_regions:
            return None, None
        for region in self._free:
            if region.nbytes == nbytes:
                self._free.remove(region)
                self._lent.add(region)
                return region, None
        room = self._max_nbytes - self._reserved_nbytes - sum(region.nbytes for region in self._lent)
        if nbytes > room:
            return None, None
        room -= sum(region.nbytes for region in self._free)
        unused: list[Region] = []
        while room < nbytes:
            unused.append(self._free.pop(0))
            room += unused[-1].nbytes
        self._reserved_nbytes += nbytes
        self._num_reserved += 1
        return None, unused

    def _wait(self, waits: bool, deadline_s: float | None) -> None:
        if not waits:
            raise _Exhausted("buffer pool is exhausted")
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise RuntimeError("timed out waiting for buffer")
        self._changed.wait(left_s)

    def _register(self, nbytes: int) -> Region:
        """Return new registered memory for a place that was reserved. The lock is not held: this takes a while."""
        region = None
        try:
            # A small region with a large alignment would be in huge pages, mostly unused ones.
            memory = aligned_buffer(nbytes, min(self._alignment, max(_MIN_ALIGNMENT, 1 << (nbytes.bit_length() - 1))))
            address = address_of(memory)
            if self._store.register_buffer(address, nbytes) != 0:
                raise RuntimeError("buffer registration failed")
            region = Region(memory, address)
        except (InvalidInput, OSError) as error:
            raise RuntimeError(f"buffer allocation failed: {error}") from error
        finally:
            with self._changed:
                self._reserved_nbytes -= nbytes
                self._num_reserved -= 1
                if region is not None:
                    self._lent.add(region)
                self._changed.notify_all()
        return region

    def _give_back(self, region: Region) -> None:
        """Called when a lease ends, by the garbage collector also in the middle of another call."""
        self._returned.append(region)
        with self._changed:
            self._changed.notify_all()

    def _collect(self) -> None:
        """Take ended leases over. The lock is held."""
        while self._returned:
            region = self._returned.popleft()
            self._lent.discard(region)
            self._free.append(region)

    def _drop(self, regions: list[Region]) -> None:
        for region in regions:
            self._store.unregister_buffer(region.address)  # refused by a store that was closed: it has forgotten them

    def _class_nbytes(self, size: int) -> int:
        """Return the size of the region for a request."""
        if size > self._max_class:
            return size
        wanted = max(size, self._min_class)
        return max(1, min(1 << (wanted - 1).bit_length(), max(self._max_class, size), self._max_nbytes))


RegisteredBufferPool = BufferPool
RegisteredBufferLease = BufferLease
RegisteredBufferLeaseView = BufferLeaseView
