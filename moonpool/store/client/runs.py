"""Which small objects of a batch lie side by side in a segment, so that they can be written by one copy. Pure.

A batch is placed together where there is room, so most small objects of it do.
"""

from __future__ import annotations

from collections.abc import Iterator

from moonpool.store.messages import GRANULE_NBYTES, Placement, num_granules

SMALL_NBYTES = 32 * 1024  # above, the copy takes longer than what is done around it
_MAX_RUN_GRANULES = 256


class ObjectRun:
    """Positions in the batch, whose objects follow each other from `offset` on."""

    __slots__ = ("end", "offset", "positions", "segment")

    def __init__(self, segment: str, offset: int) -> None:
        self.segment, self.offset, self.end = segment, offset, offset
        self.positions: list[int] = []


class ObjectRuns:
    def __init__(self) -> None:
        self._runs: list[ObjectRun] = []

    def add(self, position: int, place: Placement, nbytes: int) -> None:
        """The objects in their order, with the size of header and pieces."""
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
