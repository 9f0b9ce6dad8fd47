"""How fast a node that joins a running pool gets new objects. Pure.

New objects go to the emptiest segment. A node that comes back empty would get all of them at once, its link would be
full, and requests of workers on its machine would wait. So its share of the placements grows evenly, from none when it
is mounted to all after RAMP_S. Segments that were mounted together with the first one of the pool have no ramp; and
what finds room nowhere else goes to it at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RAMP_S = 60.0
_TOGETHER_S = 10.0  # nodes that were mounted within this time belong to the same start


@dataclass(slots=True)
class _Young:
    mounted_s: float
    credit: float = 0.0  # placements that it may take now


class PlacementRamp:
    """Tells which of the segments, by number, may take part in a placement."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._first_s: float | None = None  # when the pool's first segment was mounted
        self._young: dict[int, _Young] = {}

    def __bool__(self) -> bool:
        """Whether any segment is young."""
        return bool(self._young)

    def mounted(self, number: int) -> None:
        """Begin the ramp of a new segment, unless it came with the first ones."""
        if self._first_s is None:
            self._first_s = self._now_s
        if self._now_s - self._first_s > _TOGETHER_S:
            self._young[number] = _Young(self._now_s)

    def ended(self, number: int) -> None:
        self._young.pop(number, None)

    def advance(self, now_s: float) -> None:
        """Set the time. A segment that has had its ramp is not young any more."""
        self._now_s = now_s
        for number in [each for each, young in self._young.items() if now_s - young.mounted_s >= RAMP_S]:
            del self._young[number]

    def share(self, number: int) -> float:
        """Return the part of all placements that the segment may take now."""
        young = self._young.get(number)
        return 1.0 if young is None else (self._now_s - young.mounted_s) / RAMP_S

    def held_back(self, numbers: Sequence[int]) -> set[int]:
        """Count one placement; return those of the segments that take no part in it."""
        held = set()
        for number in numbers:
            young = self._young.get(number)
            if young is None:
                continue
            young.credit = min(young.credit + self.share(number), 1.0 + self.share(number))
            if young.credit < 1.0:
                held.add(number)
        return held

    def placed(self, number: int) -> None:
        """Count a placement on the segment."""
        young = self._young.get(number)
        if young is not None:
            young.credit -= 1.0
