"""Checksums of the pieces of many objects, computed in steps: the first ones while the master answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.base.checksum import crc32c

_STEP_NBYTES = 256 * 1024  # checksum this much, then look whether the master has answered


class BundleChecksums:
    """Checksums of the pieces of one bundle, by position. The first ones are computed while the master answers."""

    def __init__(self, pieces: Sequence[list[memoryview]]) -> None:
        self._pieces = pieces
        self._known: list[list[int]] = []

    def compute_some(self) -> bool:
        """Compute a few more. Return True if some are left."""
        nbytes = 0
        while len(self._known) < len(self._pieces):
            parts = self._pieces[len(self._known)]
            if len(parts) == 1:  # mostly
                nbytes += parts[0].nbytes
                self._known.append([crc32c(parts[0])])
            else:
                nbytes += sum([part.nbytes for part in parts])
                self._known.append(_checksums(parts))
            if nbytes >= _STEP_NBYTES:
                return True
        return False

    def of(self, position: int) -> list[int]:
        known = self._known
        return known[position] if position < len(known) else _checksums(self._pieces[position])


def _checksums(parts: list[memoryview]) -> list[int]:
    return [crc32c(part) for part in parts]
