"""Pieces of an object from ranges that arrive in any order. Pure.

The pool checksums an object piece by piece, so a piece is written when all its bytes are known. A range that covers a
whole piece is passed on as it is; smaller ones are collected in memory until their piece is complete.
"""

from __future__ import annotations

from moonpool.base.errors import InvalidInput

_MIN_PIECE_NBYTES = 64 * 1024
_MAX_PIECE_NBYTES = 1024 * 1024
_PIECES = 64  # of an object of medium size


def piece_sizes(nbytes: int) -> tuple[int, ...]:
    """Return the sizes of the pieces of an object that will be written in ranges."""
    wanted = -(-nbytes // _PIECES)
    size = min(_MAX_PIECE_NBYTES, max(_MIN_PIECE_NBYTES, -(-wanted // _MIN_PIECE_NBYTES) * _MIN_PIECE_NBYTES))
    return tuple(min(size, nbytes - at) for at in range(0, nbytes, size))


class PieceAssembly:
    """Collects one object of these pieces, all but the last of one size. For one thread at a time."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes
        self._nbytes = sum(sizes)
        self._collected: dict[int, _Collected] = {}
        self._written: set[int] = set()

    def add(self, offset: int, view: memoryview) -> list[tuple[int, memoryview]]:
        """Add the bytes from `offset` on. Return the pieces that are complete now, by index. Each of them is the
        caller's to write until it reports written() or adds the same bytes again.

        Raise InvalidInput when the bytes are outside the object, or change a part of a piece that was written.
        """
        if offset < 0 or offset + view.nbytes > self._nbytes:
            raise InvalidInput(f"{view.nbytes} bytes from {offset} on are outside an object of {self._nbytes} bytes")
        complete: list[tuple[int, memoryview]] = []
        for index, at, part in self._cut(offset, view):
            if part.nbytes == self._sizes[index]:
                self._collected.pop(index, None)
                complete.append((index, part))
                continue
            if index in self._written:
                raise InvalidInput(f"bytes {offset} to {offset + view.nbytes} were written already")
            collected = self._collected.setdefault(index, _Collected(self._sizes[index]))
            if collected.add(at, part):
                complete.append((index, collected.view))
        return complete

    def written(self, index: int) -> None:
        """Note that a complete piece was written. Its memory is freed."""
        self._written.add(index)
        self._collected.pop(index, None)

    def rest(self) -> list[tuple[int, memoryview]]:
        """Return the pieces that were not written. Bytes that were never added are 0."""
        missing = [index for index in range(len(self._sizes)) if index not in self._written]
        empty = _Collected(0)
        return [(index, (self._collected.get(index, empty)).whole(self._sizes[index])) for index in missing]

    def _cut(self, offset: int, view: memoryview) -> list[tuple[int, int, memoryview]]:
        """Return the parts of the view by piece: its index, where in the piece, and the bytes."""
        parts, done = [], 0
        while done < view.nbytes:
            index, at = divmod(offset + done, self._sizes[0])
            nbytes = min(self._sizes[index] - at, view.nbytes - done)
            parts.append((index, at, view[done : done + nbytes]))
            done += nbytes
        return parts


class _Collected:
    """Bytes of one piece. `_spans` are the parts that are known, in order, with gaps between them."""

    def __init__(self, nbytes: int) -> None:
        self.view = memoryview(bytearray(nbytes))
        self._spans: list[tuple[int, int]] = []

    def add(self, at: int, part: memoryview) -> bool:
        """Copy the part. Return whether the piece is complete."""
        self.view[at : at + part.nbytes] = part
        start, end, apart = at, at + part.nbytes, []
        for low, high in self._spans:
            if high < start or low > end:
                apart.append((low, high))
            else:
                start, end = min(start, low), max(end, high)
        self._spans = sorted([*apart, (start, end)])
        return self._spans == [(0, self.view.nbytes)]

    def whole(self, nbytes: int) -> memoryview:
        return self.view if self.view.nbytes else memoryview(bytes(nbytes))
