"""Space that several processes write together, as they tell each other of it (client/shared_puts.py)."""

from __future__ import annotations

import msgspec

from moonpool.store.messages.values import Placement


class SharedSpace(msgspec.Struct, frozen=True, array_like=True):
    """Where one object is written."""

    generation: int
    replicas: tuple[Placement, ...]


class WrittenPieces(msgspec.Struct, frozen=True, array_like=True):
    """What one process has written of an object: the crc32c of its pieces, and replicas that could not be written."""

    checksums: tuple[int, ...]
    failed: tuple[str, ...]  # segments
