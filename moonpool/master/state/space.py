"""Space on its way back: freed now, after a lease, after a writer's last moment, or when a process is gone. Pure.

Space of a put that ended without success is known by the put's generation, because its writer may say later that it
has stopped, and because a journal must tell when it was freed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

from moonpool.master.state.segments import Place, SegmentTable

EPOCH_BITS = 32
_RANGE = (1 << EPOCH_BITS) - 1
_HALF_RANGE = 1 << (EPOCH_BITS - 1)
_QUARTER_RANGE = 1 << (EPOCH_BITS - 2)


class Generations:
    """`epoch` is higher in every life of the master, and stands in the upper half."""

    def __init__(self, epoch: int) -> None:
        self.last = epoch << EPOCH_BITS

    @property
    def limit(self) -> int:
        """The highest that can be given out for a long time: the end of the epoch's range, or of the next one once half
        of it is used. Nodes refuse writes above it, so it moves long before the numbers reach it.
        """
        return (self.last + _HALF_RANGE) | _RANGE

    def are_admitted_up_to(self, limit: int) -> bool:
        """Whether a node with that limit lets in the writers of all that are given out in the near future."""
        return limit - self.last >= _QUARTER_RANGE

    def take(self, count: int = 1) -> int:
        """The first of `count` new ones."""
        first = self.last + 1
        self.last += count
        return first


class SpaceReturns:
    """Owns every span that belongs to no object and no put and is not free yet."""

    def __init__(self, segments: SegmentTable) -> None:
        self._segments = segments
        self._resting: list[tuple[float, int, Sequence[Place], int, int]] = []  # (free at, tie, where, nbytes, of put)
        self._count = 0
        # Of ended puts, by generation: places, size and session. With session 0 it is in _resting too.
        self.of_puts: dict[int, tuple[Sequence[Place], int, int]] = {}
        self._held: dict[int, dict[int, None]] = {}  # session -> generations of its ended puts
        self._let_go: dict[int, int] = {}  # session -> up to which generation it writes nothing in place any more

    def rest(self, places: Sequence[Place], nbytes: int, until_s: float, now_s: float) -> None:
        """Frees the space at `until_s`, at once when that is past."""
        if until_s <= now_s:
            self._free(places, nbytes)
        elif places:
            self._push(until_s, places, nbytes, 0)

    def rest_put(self, generation: int, places: Sequence[Place], nbytes: int, until_s: float) -> None:
        """Of an ended put whose late writes are refused by its node from then on at the latest."""
        self.of_puts[generation] = (places, nbytes, 0)
        self._push(until_s, places, nbytes, generation)

    def hold_put(self, generation: int, places: Sequence[Place], nbytes: int, session: int) -> None:
        """Of an ended put that its process may still be writing in place: until settled() or session_gone()."""
        self.of_puts[generation] = (places, nbytes, session)
        self._held.setdefault(session, {})[generation] = None

    def settled(self, generation: int) -> bool:
        """The writer of that put has stopped: its space is free now. False when none is held for it."""
        kept = self.of_puts.pop(generation, None)
        if kept is None:
            return False
        places, nbytes, session = kept
        if session:
            self._no_longer_held(session, generation)
        self._free(places, nbytes)
        return True

    def session_gone(self, session: int) -> list[int]:
        """The process has ended; the generations of the puts whose space is free now."""
        self._let_go.pop(session, None)
        generations = list(self._held.get(session, ()))
        return [generation for generation in generations if self.settled(generation)]

    def let_go(self, session: int, up_to: int, until_s: float) -> bool:
        """The process writes none of these in place any more, up to that generation. What it sent over a network may
        still arrive, so they rest. True when there were any.
        """
        if up_to > self._let_go.get(session, 0):
            self._let_go[session] = up_to
        found = [each for each in self._held.get(session, ()) if each <= up_to]
        for generation in found:
            places, nbytes, _ = self.of_puts[generation]
            self._no_longer_held(session, generation)
            self.rest_put(generation, places, nbytes, until_s)
        return bool(found)

    def let_go_by(self, session: int) -> int:
        """Up to which generation that process writes nothing in place."""
        return self._let_go.get(session, 0)

    def let_go_of(self) -> Iterable[tuple[int, int]]:
        """By session, the same."""
        return self._let_go.items()

    def sessions(self) -> list[int]:
        return list(self._held)

    def release_due(self, now_s: float, limit: int) -> tuple[int, list[int]]:
        """Frees up to `limit` spans whose time has come; how many, and the generations of those that were puts'."""
        done, generations = 0, []
        while done < limit and self._resting and self._resting[0][0] <= now_s:
            _, _, places, nbytes, generation = heapq.heappop(self._resting)
            done += 1
            if not generation:
                self._free(places, nbytes)
            elif self.settled(generation):
                generations.append(generation)
        return done, generations

    def spans(self) -> Iterator[tuple[Place, int]]:
        """All space still on its way, with its size."""
        for _, _, places, nbytes, generation in self._resting:
            if not generation:
                for place in places:
                    yield place, nbytes
        for places, nbytes, _ in self.of_puts.values():
            for place in places:
                yield place, nbytes

    def _no_longer_held(self, session: int, generation: int) -> None:
        held = self._held[session]
        del held[generation]
        if not held:
            del self._held[session]

    def _push(self, until_s: float, places: Sequence[Place], nbytes: int, generation: int) -> None:
        self._count += 1
        heapq.heappush(self._resting, (until_s, self._count, places, nbytes, generation))

    def _free(self, places: Sequence[Place], nbytes: int) -> None:
        for number, offset in places:
            self._segments.release(number, offset, nbytes)
