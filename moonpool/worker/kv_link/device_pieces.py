"""Pieces of KV memory that lies on a GPU, reached through a host mirror of the same layout.

The mirror is the segment that other processes use: the bytes that they write are copied to the device once they are
verified (`apply_received`), and pieces that are sent are copied to the mirror just before (`read`). The mirror is
page-locked, so copies run at the speed of the bus.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from moonpool.base.errors import NoSpace
from moonpool.engine.kv_tensor import KvMemory


class DevicePieces:
    """Copies run on a separate CUDA stream and are complete when a call returns. `mirror` must outlive this object."""

    def __init__(self, mirror: memoryview, kv: KvMemory) -> None:
        self.layout = kv.layout
        self._mirror = mirror
        self._device = kv.tensor.view(torch.uint8)  # [page, layer, 2, kv head, token, bytes of a row]
        self._host = torch.frombuffer(mirror, dtype=torch.uint8, count=self.layout.total_nbytes).view(
            self._device.shape
        )
        self._stream = torch.cuda.Stream(self._device.device)  # type: ignore[no-untyped-call]
        assert kv.stream is not None, "pages in device memory"
        self._compute_stream = kv.stream
        self._lock = threading.Lock()
        status = torch.cuda.cudart().cudaHostRegister(self._host.data_ptr(), self._host.nbytes, 0)  # type: ignore[no-untyped-call]
        if int(status) != 0:
            raise NoSpace(f"{self._host.nbytes} bytes of host memory cannot be page-locked (CUDA error {int(status)})")

    def read(self, pages: Sequence[int], layer: int) -> list[memoryview]:
        self._copy(self._host, self._device, [(page, layer) for page in pages])
        return [self.received(page, layer) for page in pages]

    def received(self, page: int, layer: int) -> memoryview:
        offset, nbytes = self.layout.piece(page, layer)
        return self._mirror[offset : offset + nbytes]

    def apply_received(self, pages: Sequence[int], layer: int | None = None) -> None:
        self._copy(self._device, self._host, pages if layer is None else [(page, layer) for page in pages])

    def close(self) -> None:
        """Unlock the mirror; nothing may be copied afterwards."""
        torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr())  # type: ignore[no-untyped-call]

    def _copy(self, target: torch.Tensor, source: torch.Tensor, places: Sequence[Any]) -> None:
        """Copy these indices of one tensor to the other, with one wait for all."""
        with self._lock, torch.cuda.stream(self._stream):
            # The model writes pieces on its own stream; that must be done before the copy.
            self._stream.wait_stream(self._compute_stream)
            for place in places:
                target[place].copy_(source[place], non_blocking=True)
            self._stream.synchronize()
