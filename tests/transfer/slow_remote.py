"""Remote segments for tests of submit(): one that waits to be let go, one that is slow, one that refuses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from waiting import HANG_S

from moonpool.base.errors import MoonpoolError
from moonpool.transfer.memory.buffers import Buffer, as_bytes_view, as_bytes_views
from moonpool.transfer.transports.base import RemoteSegment


class FakeRemote(RemoteSegment):
    """Memory of this process. `before` is called with the places of each call, before a byte is moved."""

    transport = "fake"

    def __init__(self, nbytes: int = 1 << 20, before: Callable[[list[tuple[int, int]]], None] | None = None) -> None:
        self.nbytes = nbytes
        self.memory = bytearray(nbytes)
        self.calls: list[list[tuple[int, int]]] = []  # of each call: (offset, nbytes) of its items
        self.messages: list[bytes] = []
        self.touching = 0
        self._before = before
        self._lock = threading.Lock()

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        self._move([(offset, as_bytes_views(buffers, True))], write=False)

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        self._move([(offset, as_bytes_views(buffers, False))], write=True)

    def read_many(self, items: Sequence[tuple[int, Buffer]], *, timeout_s: float) -> None:
        self._move([(offset, [as_bytes_view(buffer, True)]) for offset, buffer in items], write=False)

    def write_many(self, items: Sequence[tuple[int, Buffer]], *, generation: int, timeout_s: float) -> None:
        self._move([(offset, [as_bytes_view(buffer, False)]) for offset, buffer in items], write=True)

    def notify(self, message: bytes, *, timeout_s: float) -> None:
        self.messages.append(message)

    def close(self) -> None:
        pass

    def _move(self, places: list[tuple[int, list[memoryview]]], *, write: bool) -> None:
        spans = [(offset, sum(view.nbytes for view in views)) for offset, views in places]
        with self._lock:
            self.calls.append(spans)
            self.touching += 1
        try:
            if self._before is not None:
                self._before(spans)
            for offset, views in places:
                self._copy(offset, views, write)
        finally:
            with self._lock:
                self.touching -= 1

    def _copy(self, offset: int, views: list[memoryview], write: bool) -> None:
        for view in views:
            if write:
                self.memory[offset : offset + view.nbytes] = view
            else:
                view[:] = self.memory[offset : offset + view.nbytes]
            offset += view.nbytes


class Gate(FakeRemote):
    """Every call waits until `open` is set; `entered` counts those that began."""

    def __init__(self, nbytes: int = 1 << 20) -> None:
        super().__init__(nbytes, self._pass)
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def close(self) -> None:
        self.open.set()

    def _pass(self, spans: list[tuple[int, int]]) -> None:
        self.entered.release()
        assert self.open.wait(HANG_S)


class Stepped(FakeRemote):
    """Each call waits for one `go_on`; `entered` counts those that began."""

    def __init__(self, nbytes: int = 1 << 20) -> None:
        super().__init__(nbytes, self._pass)
        self.entered = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def _pass(self, spans: list[tuple[int, int]]) -> None:
        self.entered.release()
        assert self.go_on.acquire(timeout=HANG_S)


def slow(seconds: float, nbytes: int = 1 << 20) -> FakeRemote:
    return FakeRemote(nbytes, lambda spans: time.sleep(seconds))


def refusing(*offsets: int, error: MoonpoolError) -> FakeRemote:
    """Refuses every call that touches one of the offsets."""

    def before(spans: list[tuple[int, int]]) -> None:
        if any(offset in offsets for offset, _ in spans):
            raise error

    return FakeRemote(before=before)
