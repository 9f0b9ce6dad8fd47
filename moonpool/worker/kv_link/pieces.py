"""Pieces: the bytes of one layer of a page, readable and writable by transports.

On a CPU a piece is a view of the KV memory itself; on a GPU it is copied through host memory (device_pieces.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from moonpool.engine.kv_memory import KvLayout

T = TypeVar("T")


class PieceMemory(Protocol):
    """Thread-safe, but two threads must not write the same piece at the same time."""

    layout: KvLayout

    def read(self, pages: Sequence[int], layer: int) -> list[memoryview]:
        """Return the bytes of these pages' pieces as they are now. A view must not be kept past its page's reuse."""
        ...

    def fill(self, pages: Sequence[int], layer: int, write: Callable[[list[memoryview]], T]) -> T:
        """Let `write` fill the pieces and return what it returns. A piece that it did not fill, and all pieces when it
        raises, have undefined content.
        """
        ...

    def received(self, page: int, layer: int) -> memoryview:
        """Return the bytes that another process wrote for this piece into the segment that this worker serves."""
        ...

    def apply_received(self, pages: Sequence[int]) -> None:
        """Make the received bytes the content of these pages."""
        ...


class HostPieces:
    """Pieces of KV memory that this process has mapped."""

    def __init__(self, memory: memoryview, layout: KvLayout) -> None:
        self.layout = layout
        self._memory = memory

    def read(self, pages: Sequence[int], layer: int) -> list[memoryview]:
        return [self.received(page, layer) for page in pages]

    def fill(self, pages: Sequence[int], layer: int, write: Callable[[list[memoryview]], T]) -> T:
        return write(self.read(pages, layer))

    def received(self, page: int, layer: int) -> memoryview:
        offset, nbytes = self.layout.piece(page, layer)
        return self._memory[offset : offset + nbytes]

    def apply_received(self, pages: Sequence[int]) -> None:
        """Do nothing: the segment is the KV memory."""
