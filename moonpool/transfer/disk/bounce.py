"""What unaligned requests need: a few aligned buffers, and one writer at a time per partly written block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from moonpool.base.clock import Deadline
from moonpool.base.errors import DeadlineExceeded
from moonpool.transfer.memory.buffers import aligned_buffer


class BouncePool:
    """Aligned buffers, made when first needed, never more than `max_buffers`."""

    def __init__(self, buffer_nbytes: int, max_buffers: int, alignment: int) -> None:
        self.buffer_nbytes = buffer_nbytes
        self._alignment = alignment
        self._lock = threading.Lock()
        self._room = threading.Semaphore(max_buffers)
        self._free: list[memoryview] = []
        self.num_borrowed = 0  # how often, since the start

    @contextmanager
    def borrow(self, deadline: Deadline) -> Iterator[memoryview]:
        if not self._room.acquire(timeout=deadline.remaining_s()):
            raise DeadlineExceeded("no bounce buffer became free in time")
        try:
            buffer = self._take()
            try:
                yield buffer
            finally:
                self._free.append(buffer)
        finally:
            self._room.release()

    def _take(self) -> memoryview:
        with self._lock:
            self.num_borrowed += 1
            if self._free:
                return self._free.pop()
        return aligned_buffer(self.buffer_nbytes, self._alignment)


class BlockLocks:
    """Excludes threads from each other, block by block."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: set[int] = set()

    @contextmanager
    def hold(self, block: int, deadline: Deadline) -> Iterator[None]:
        with self._changed:
            if not self._changed.wait_for(lambda: block not in self._held, deadline.remaining_s()):
                raise DeadlineExceeded(f"the block at {block} was being written for too long")
            self._held.add(block)
        try:
            yield
        finally:
            with self._changed:
                self._held.discard(block)
                self._changed.notify_all()
