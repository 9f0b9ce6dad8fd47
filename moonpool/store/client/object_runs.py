"""Finds small objects of a batch that are neighbours in their segment, so that one copy writes them all. Pure.

The master places a batch in one run of space where it can.
"""

from __future__ import annotations

from collections.abc import Iterator

from moonpool.store.messages import GRANULE_NBYTES, Placement, num_granules

_MAX_RUN_GRANULES = 256


class ObjectRun:
    """Positions of objects that follow each other in the segment from `offset` on."""

    __slots__ = ("end", "offset", "positions", "segment")

    def __init__(self, segment: str, offset: int) -> None:
        self.segment, self.offset, self.end = segment, offset, offset
        self.positions: list[int] = []


class ObjectRuns:
    """Finds small objects of a batch that are neighbours in their segment. Pure."""

    def __init__(self) -> None:
        self._runs: list[ObjectRun] = []

    def add(self, position: int, place: Placement, nbytes: int) -> None:
        """Add the next object of the batch. `nbytes` is the size of header and pieces."""
        run = self._runs[-1] if self._runs else None
        if (
            run is None
            or run.end != place.offset
            or run.segment != place.segment
            or run.end - run.offset >= _MAX_RUN_GRANULES * GRANULE_NBYTES
        ):
            run = ObjectRun(place.segment, place.offset)
            self._runs.append(run)
        run.positions.append(position)
        run.end += num_granules(nbytes) * GRANULE_NBYTES

    def all(self) -> Iterator[ObjectRun]:
        return iter(self._runs)

    def __bool__(self) -> bool:
        return bool(self._runs)
