"""Pieces: the bytes of one layer of a page, as transports read and write them.

On a CPU a piece is a view of the KV memory itself. On a GPU (device_pieces.py) it is a span of device memory, its
checksum is taken where it lies, and steps that compute or use it are ordered by events of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moonpool.base.checksum import crc32c
from moonpool.engine.kv_memory import KvLayout
from moonpool.transfer.memory.buffers import Memory

Checksums: TypeAlias = NDArray[np.uint32]


class ReadyPoint(Protocol):
    """A point in the work of a GPU; pieces are complete when the device has reached it."""

    def synchronize(self) -> None: ...


class PieceMemory(Protocol):
    """Thread-safe, but two threads must not write the same piece at the same time."""

    layout: KvLayout
    layer_run: int  # layers that are sent together: a GPU's copies should be large
    puts_whole: bool  # whether blocks go to the pool as a whole, when their last layer is computed

    def memory(self, page: int, layers: range) -> Memory:
        """Return the memory of these layers of a page, one run of bytes. It must not be kept past the page's reuse."""
        ...

    def mark(self) -> ReadyPoint | None:
        """Return the point at which all that was computed so far is in the pieces; None: they are complete now."""
        ...

    def checksums(self, pages: Sequence[int], layers: range, ready: ReadyPoint | None = None) -> Checksums:
        """Return the crc32c of each piece, [page, layer], as it is once `ready` is reached; waits for that."""
        ...


class HostPieces:
    """Pieces of KV memory that this process has mapped."""

    layer_run = 1
    puts_whole = False

    def __init__(self, memory: memoryview, layout: KvLayout) -> None:
        self.layout = layout
        self._memory = memory

    def memory(self, page: int, layers: range) -> memoryview:
        offset, nbytes = self.layout.piece(page, layers.start)
        return self._memory[offset : offset + nbytes * len(layers)]

    def piece(self, page: int, layer: int) -> memoryview:
        offset, nbytes = self.layout.piece(page, layer)
        return self._memory[offset : offset + nbytes]

    def mark(self) -> ReadyPoint | None:
        return None

    def checksums(self, pages: Sequence[int], layers: range, ready: ReadyPoint | None = None) -> Checksums:
        found = [[crc32c(self.piece(page, layer)) for layer in layers] for page in pages]
        return np.array(found, dtype=np.uint32).reshape(len(pages), len(layers))
