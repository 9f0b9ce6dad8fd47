"""A page's bytes of one layer, readable and writable by transports, wherever the page lies.

On a CPU the piece is a view of the KV memory itself; on a GPU it is copied through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from moonpool.engine.kv_memory import KvLayout


class PieceMemory(Protocol):
    """Access to pieces from any thread; a piece must not be written by two at a time."""

    layout: KvLayout

    def read(self, page: int, layer: int) -> memoryview:
        """The piece's bytes as they are now. The caller must not keep the view past the page's reuse."""
        ...

    def fill(self, page: int, layer: int, write: Callable[[memoryview], None]) -> None:
        """Lets `write` fill the piece; when it raises, the piece's content is undefined."""
        ...

    def received(self, page: int, layer: int) -> memoryview:
        """What another process wrote for this piece into the segment that this worker serves."""
        ...

    def land(self, pages: Sequence[int]) -> None:
        """Makes what was received the content of these pages."""
        ...


class HostPieces:
    """Pieces of KV memory that this process has mapped."""

    def __init__(self, memory: memoryview, layout: KvLayout) -> None:
        self.layout = layout
        self._memory = memory

    def read(self, page: int, layer: int) -> memoryview:
        offset, nbytes = self.layout.piece(page, layer)
        return self._memory[offset : offset + nbytes]

    def fill(self, page: int, layer: int, write: Callable[[memoryview], None]) -> None:
        write(self.read(page, layer))

    def received(self, page: int, layer: int) -> memoryview:
        return self.read(page, layer)

    def land(self, pages: Sequence[int]) -> None:
        """Nothing: the segment is the KV memory."""
