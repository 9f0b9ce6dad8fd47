"""A GPU in main memory: its addresses are addresses of this process, its copies are over when they are started.

With it the code that starts, orders and verifies copies runs where there is no GPU. `FakeDevice.after_copy` may change
what has arrived, as a faulty bus would.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from moonpool.base.checksum import crc32c
from moonpool.engine.kv_memory import KvLayout
from moonpool.store.client import whole_puts
from moonpool.transfer.memory.buffers import address_of
from moonpool.transfer.transports import mapped
from moonpool.transfer.transports.cuda import copy
from moonpool.transfer.transports.cuda.copy_stream import CopyStream
from moonpool.worker.kv_link.device_pieces import DevicePieces
from moonpool.worker.kv_link.pieces import Checksums, ReadyPoint


class FakeDevice:
    index = 0

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._kept: list[bytearray] = []
        self.after_copy: Callable[[int, int], None] | None = None  # (address of the target, nbytes)
        self.num_copies = 0
        self.locked: dict[int, int] = {}

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def stream(self) -> int:
        return next(self._numbers)

    def event(self) -> int:
        return next(self._numbers)

    def pinned(self, nbytes: int) -> tuple[int, memoryview]:
        self._kept.append(bytearray(nbytes))
        view = memoryview(self._kept[-1])
        return address_of(view), view

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def copy_batch(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, stream: int) -> None:
        for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self.copy(target, source, nbytes, stream)
            self.num_copies += 1
            if self.after_copy is not None:
                self.after_copy(target, nbytes)

    def register(self, address: int, nbytes: int) -> None:
        self.locked[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.locked[address]

    def record(self, event: int, stream: int) -> None: ...
    def wait_event(self, event: int) -> None: ...
    def free_event(self, event: int) -> None: ...
    def wait_stream(self, stream: int) -> None: ...


class FakeReady:
    def synchronize(self) -> None: ...


class FakeSums:
    def __init__(self, sums: Checksums) -> None:
        self._sums = sums

    def wait(self) -> Checksums:
        return self._sums


class FakeLane:
    def __init__(self, memory: FakeDevicePieces) -> None:
        self._memory = memory
        self.copies = CopyStream(memory.device)

    def begin(self, pages: Sequence[int], after: ReadyPoint | None) -> None:
        self._pages = list(pages)

    def mark(self) -> FakeReady:
        return FakeReady()

    def start_checksums(self, first: int, last: int, layers: range) -> FakeSums:
        return FakeSums(self._memory.checksums(self._pages[first:last], layers))


class FakeDevicePieces(DevicePieces):
    """Pages in `content`, which this process can look at."""

    def __init__(self, layout: KvLayout, device: FakeDevice) -> None:
        self.layout = layout
        self.layer_run = 1
        self.device = cast(Any, device)
        self.content = np.zeros((layout.num_pages, layout.num_layers, layout.piece_nbytes), np.uint8)
        self._address = self.content.ctypes.data
        self._kv = cast(Any, SimpleNamespace(tensor=self.content))
        self.waited_for: list[ReadyPoint] = []

    def mark(self) -> Any:
        return FakeReady()

    def compute_after(self, ready: ReadyPoint) -> None:
        self.waited_for.append(ready)

    def checksums(self, pages: Sequence[int], layers: range, ready: ReadyPoint | None = None) -> Checksums:
        found = [[crc32c(self.content[page, layer]) for layer in layers] for page in pages]
        return np.array(found, np.uint32).reshape(len(pages), len(layers))

    def new_lane(self) -> Any:
        return FakeLane(self)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A GPU that the code under test takes for one."""
    device = FakeDevice()
    driver = SimpleNamespace(
        device_of=lambda address: device,
        is_pinned=lambda address: any(at <= address < at + nbytes for at, nbytes in device.locked.items()),
        registrations_between=lambda start, end: sorted(at for at in device.locked if start < at < end),
    )
    for module in (whole_puts, mapped, copy):
        monkeypatch.setattr(module, "driver", lambda: driver)
    return device
