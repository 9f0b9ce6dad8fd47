"""Pieces of KV memory that lies on a GPU, reached through a host mirror of the same layout.

The mirror is the segment that other processes see: what they write there is copied to the device once it is verified
(`land`), and what they read from it was copied down just before (`read`). It is page-locked, so copies run at
the link's speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from moonpool.base.errors import NoSpace
from moonpool.engine.kv_tensor import KvMemory


class DevicePieces:
    """Copies are on a stream of their own and complete when a call returns. `mirror` must outlive this object."""

    def __init__(self, mirror: memoryview, kv: KvMemory) -> None:
        self.layout = kv.layout
        self._mirror = mirror
        self._device = kv.tensor.view(torch.uint8)  # [page, layer, 2, kv head, token, bytes of a row]
        self._host = torch.frombuffer(mirror, dtype=torch.uint8, count=self.layout.total_nbytes).view(
            self._device.shape
        )
        self._stream = torch.cuda.Stream(self._device.device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        status = torch.cuda.cudart().cudaHostRegister(self._host.data_ptr(), self._host.nbytes, 0)  # type: ignore[no-untyped-call]
        if int(status) != 0:
            raise NoSpace(f"{self._host.nbytes} bytes of host memory cannot be page-locked (CUDA error {int(status)})")

    def read(self, page: int, layer: int) -> memoryview:
        # Whoever computed the piece did so on the default stream; it must be done before the copy.
        self._copy(lambda: self._host[page, layer].copy_(self._device[page, layer], non_blocking=True))
        return self.received(page, layer)

    def fill(self, page: int, layer: int, write: Callable[[memoryview], None]) -> None:
        write(self.received(page, layer))
        self._copy(lambda: self._device[page, layer].copy_(self._host[page, layer], non_blocking=True))

    def received(self, page: int, layer: int) -> memoryview:
        offset, nbytes = self.layout.piece(page, layer)
        return self._mirror[offset : offset + nbytes]

    def land(self, pages: Sequence[int]) -> None:
        def copy_all() -> None:
            for page in pages:
                self._device[page].copy_(self._host[page], non_blocking=True)

        self._copy(copy_all)

    def close(self) -> None:
        """Unlocks the mirror; nothing may be copied afterwards."""
        torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())  # type: ignore[no-untyped-call]

    def _copy(self, enqueue: Callable[[], object]) -> None:
        with self._lock, torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._device.device))
            enqueue()
            self._stream.synchronize()
