"""Which memory holds which bytes of an object's pieces. Pure.

An object consists of pieces, the caller's memory of buffers or ranges, and their borders need not agree. Pieces are
verified whole, so a cut also lists bytes of a piece that the caller did not ask for, without memory (None).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from moonpool.base.errors import InvalidInput

Part: TypeAlias = tuple[int, memoryview | None]  # number of bytes, and the memory for them
Range: TypeAlias = tuple[int, memoryview]  # offset in the object's bytes, and the memory


class PieceCut(NamedTuple):
    """A piece and all its bytes in order."""

    piece: int
    parts: list[Part]


def scatter(sizes: Sequence[int], targets: Sequence[memoryview]) -> list[list[memoryview]]:
    """Return the memory for each piece, from targets filled one after the other. Raise InvalidInput when the targets
    are too small; they may be larger.
    """
    if len(targets) == 1 and len(sizes) == 1 and targets[0].nbytes == sizes[0]:
        return [[targets[0]]]
    room, wanted = sum(target.nbytes for target in targets), sum(sizes)
    if room < wanted:
        raise InvalidInput(f"the object has {wanted} bytes, the buffer {room}")
    pieces: list[list[memoryview]] = []
    rest = [target for target in reversed(targets) if target.nbytes]
    for nbytes in sizes:
        parts: list[memoryview] = []
        while nbytes:
            target = rest.pop()
            if target.nbytes > nbytes:
                rest.append(target[nbytes:])
                target = target[:nbytes]
            parts.append(target)
            nbytes -= target.nbytes
        pieces.append(parts)
    return pieces


def gather(views: Sequence[memoryview], piece_nbytes: int) -> list[memoryview]:
    """Return the views as pieces of at most `piece_nbytes`, without empty ones."""
    if len(views) == 1 and 0 < views[0].nbytes <= piece_nbytes:
        return [views[0]]
    return [
        view[at : at + piece_nbytes] if view.nbytes > piece_nbytes else view
        for view in views
        for at in range(0, view.nbytes, piece_nbytes)
    ]


def cut_ranges(sizes: Sequence[int], ranges: Sequence[Range]) -> list[PieceCut]:
    """Return every piece that a range touches, whole. The ranges must not overlap. Raise InvalidInput when one ends
    behind the object's end.
    """
    rest = sorted((each for each in ranges if each[1].nbytes), key=lambda each: each[0], reverse=True)
    cuts: list[PieceCut] = []
    start = 0
    for index, nbytes in enumerate(sizes):
        end = start + nbytes
        if rest and rest[-1][0] < end:
            cuts.append(PieceCut(index, _cut_piece(start, end, rest)))
        start = end
    if rest:
        offset, view = rest[0]
        raise InvalidInput(f"bytes {offset} to {offset + view.nbytes} are outside the object of {start} bytes")
    return cuts


def _cut_piece(start: int, end: int, rest: list[Range]) -> list[Part]:
    """Remove from `rest`, which is in reverse order, the ranges in this piece, and return the piece's parts."""
    parts: list[Part] = []
    while rest and rest[-1][0] < end:
        offset, view = rest.pop()
        if offset > start:
            parts.append((offset - start, None))
        inside = view[: end - offset]
        parts.append((inside.nbytes, inside))
        start = offset + inside.nbytes
        if inside.nbytes < view.nbytes:
            rest.append((end, view[inside.nbytes :]))
    if start < end:
        parts.append((end - start, None))
    return parts


def without_overlaps(ranges: Sequence[Range]) -> list[list[Range]]:
    """Return the ranges in as few rounds as possible, such that the ranges of one round do not overlap."""
    rounds: list[list[Range]] = []
    for each in sorted(ranges, key=lambda each: each[0]):
        fitting = next((r for r in rounds if r[-1][0] + r[-1][1].nbytes <= each[0]), None)
        if fitting is None:
            rounds.append([each])
        else:
            fitting.append(each)
    return rounds
