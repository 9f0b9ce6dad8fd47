"""Reads of single objects from any replica: for what failed a check in a batch, and for reads of ranges and pieces.

A ReadSession reports a wrong replica, tries the others and raises what is wrong; Recovery looks an object up again that
was moved or replaced meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import numpy as np

from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound, Refused, StaleGeneration, Unavailable
from moonpool.store.client.cuts import Range, cut_ranges, scatter, without_overlaps
from moonpool.store.client.read_session import Failures, ReadSession
from moonpool.store.client.read_tools import ReadTools
from moonpool.store.messages import ObjectInfo

T = TypeVar("T")
Targets: TypeAlias = Sequence[memoryview] | None  # the memory for an object's bytes; None: new bytes
Got: TypeAlias = int | bytes | MoonpoolError  # the number of bytes, or the bytes themselves, or the error
LookAgain = Callable[[bytes], ObjectInfo | None]


class Recovery:
    """Reads objects one by one from any replica; looks an object up again if it was moved or replaced meanwhile.

    `failures` are the segments that could not be reached: the next object does not wait for them again.
    """

    def __init__(self, tools: ReadTools, look_again: LookAgain, identity: bytes | None) -> None:
        self._tools, self._look_again, self._identity = tools, look_again, identity
        self.failures: Failures = {}

    def read(self, info: ObjectInfo, read: Callable[[ReadSession], T]) -> T:
        """Return what `read` returns for the open object. Raise NotFound when the object is gone, and what ReadSession
        raises.
        """
        try:
            return self._read_once(info, read)
        except (StaleGeneration, Unavailable, NotFound):
            fresh = self._look_again(info.key)
        if fresh is None:
            raise missing(info.key)
        return self._read_once(fresh, read)

    def _read_once(self, info: ObjectInfo, read: Callable[[ReadSession], T]) -> T:
        try:
            session = ReadSession(info, self._identity, self._tools, self.failures)
            got = read(session)
            session.finish()
        except MoonpoolError as error:
            self._tools.counters.add_refusal(error)
            raise
        return got


def none_if_missing(got: Got) -> int | bytes | None:
    """Return None for a miss. Raise other errors."""
    if not isinstance(got, MoonpoolError):
        return got
    if isinstance(got, Refused | NotFound):
        return None
    raise got


def missing(key: bytes) -> NotFound:
    return NotFound(f"{key.hex()[:16]} is not in the pool")


def read_whole(session: ReadSession, targets: Targets) -> int | bytes:
    """Read all pieces into the targets, and return how many bytes; or return new bytes. InvalidInput when the targets
    are too small.
    """
    room = [np.empty(session.nbytes, np.uint8).data] if targets is None else targets
    for index, views in enumerate(scatter(session.fields.sizes, room)):
        session.read_parts(index, [(view.nbytes, view) for view in views])
    return session.nbytes if targets is not None else bytes(room[0])


def read_ranges(session: ReadSession, ranges: Sequence[Range]) -> int:
    """Read every piece that a range touches, whole, and verify it. Return how many bytes the ranges have; InvalidInput
    for a range outside the object.
    """
    for offset, _ in ranges:
        if offset < 0:
            raise InvalidInput(f"a range cannot begin at {offset}")
    for some in without_overlaps(ranges):
        for index, parts in cut_ranges(session.fields.sizes, some):
            session.read_parts(index, parts)
    return sum(view.nbytes for _, view in ranges)


def copy_pieces(session: ReadSession) -> tuple[memoryview, ...]:
    """Return a private copy of each piece."""
    copy = np.empty(session.nbytes, np.uint8)
    copy_view, pieces, at = copy.data, list[memoryview](), 0
    for index, nbytes in enumerate(session.fields.sizes):
        pieces.append(copy_view[at : at + nbytes])
        session.read_piece(index, pieces[-1])
        at += nbytes
    return tuple(piece.toreadonly() for piece in pieces)
