"""Pieces: the bytes of one layer of a page, readable and writable by transports.

On a CPU a piece is a view of the KV memory itself; on a GPU it is copied through host memory (device_pieces.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moonpool.engine.kv_memory import KvLayout


class PieceMemory(Protocol):
    """Thread-safe, but two threads must not write the same piece at the same time."""

    layout: KvLayout

    def read(self, pages: Sequence[int], layer: int) -> list[memoryview]:
        """Return the bytes of these pages' pieces as they are now. A view must not be kept past its page's reuse."""
        ...

    def received(self, page: int, layer: int) -> memoryview:
        """Return the memory that bytes for this piece are written to: by another process, or by a pull."""
        ...

    def apply_received(self, pages: Sequence[int], layer: int | None = None) -> None:
        """Make the received bytes the content of these pages, or of one layer of them."""
        ...


class HostPieces:
    """Pieces of KV memory that this process has mapped."""

    def __init__(self, memory: memoryview, layout: KvLayout) -> None:
        self.layout = layout
        self._memory = memory

    def read(self, pages: Sequence[int], layer: int) -> list[memoryview]:
        return [self.received(page, layer) for page in pages]

    def received(self, page: int, layer: int) -> memoryview:
        offset, nbytes = self.layout.piece(page, layer)
        return self._memory[offset : offset + nbytes]

    def apply_received(self, pages: Sequence[int], layer: int | None = None) -> None:
        """Do nothing: the segment is the KV memory."""
