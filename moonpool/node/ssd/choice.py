"""Which file to empty next. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class FileLoad(NamedTuple):
    """A sealed file: objects that live, objects ever written there, and the most that it could hold."""

    live_nbytes: int
    written_nbytes: int
    capacity_nbytes: int


def choose_victim(loads: Mapping[int, FileLoad], dead_fraction: float) -> int | None:
    """The file with the least to move, the oldest of equals: its tombstones are the first that nothing needs any
    more. None when every file is worth its space.
    """
    worth = [(load.live_nbytes, number) for number, load in loads.items() if _is_worth_it(load, dead_fraction)]
    return min(worth)[1] if worth else None


def _is_worth_it(load: FileLoad, dead_fraction: float) -> bool:
    """Much in it is dead, or it was sealed half empty (at a restart). A file that is full of living objects never is,
    however they fit, or the same objects would be moved for ever.
    """
    dead_nbytes = load.written_nbytes - load.live_nbytes
    half_empty = 2 * load.written_nbytes <= load.capacity_nbytes
    return load.live_nbytes == 0 or half_empty or dead_nbytes >= dead_fraction * load.capacity_nbytes
