"""The pool's DRAM space: granted with a generation, and freed when no process can still write or read it. Pure.

Puts and copies get space in one way: `place` allocates it, `stamp` gives it a generation, and one of the `free` methods
takes it back. Space of a put that ended without an object is kept under the put's generation, because the writer may
report later that it has stopped, and because the journal records when that space is freed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from moonpool.master.state.records import Freed, HeldPut, LetGo, Outcomes
from moonpool.master.state.segments import Place, SegmentTable
from moonpool.store.messages import Placement

EPOCH_BITS = 32
_RANGE = (1 << EPOCH_BITS) - 1
_HALF_RANGE = 1 << (EPOCH_BITS - 1)
_QUARTER_RANGE = 1 << (EPOCH_BITS - 2)
_MOST_EARLY_S = 86_400  # another master's clock, which gives its epoch, may be so far ahead


class Generations:
    """Issues a number for each allocation, higher than all before it, across restarts too: the upper half of the number
    is the master's epoch.

    Nodes and the journal name generations of other masters: of one that used a later copy of the journal's folder, or
    of another pool. `epoch_now` returns the epoch of a master that started now, 0 if no clock tells. What no master
    can have issued by then is refused: issuing only higher numbers would leave none.
    """

    def __init__(self, epoch: int, epoch_now: Callable[[], int] = lambda: 0) -> None:
        self.last = epoch << EPOCH_BITS
        self._first_epoch, self._epoch_now = epoch, epoch_now
        self.counters = {"generations_refused": 0}

    @property
    def epoch(self) -> int:
        """The epoch of the latest generation. It is above the master's own once that range is used up, or once a node
        has named a later one."""
        return self.last >> EPOCH_BITS

    def is_possible(self, generation: int) -> bool:
        """Return whether a master can have issued it. Count it if not."""
        if generation <= self.last:
            return True
        latest = max(self._first_epoch, self._epoch_now()) + _MOST_EARLY_S  # however often nodes name later ones
        possible = generation >> EPOCH_BITS <= latest
        self.counters["generations_refused"] += not possible
        return possible

    def rise_above(self, known: int) -> None:
        """Issue only generations of an epoch above that of `known`, which another master has issued and is_possible().
        Do nothing if `known` is no later than the last one."""
        if known > self.last:
            self.last = ((known >> EPOCH_BITS) + 1) << EPOCH_BITS

    @property
    def limit(self) -> int:
        """The highest generation that can be issued for a long time: the end of the epoch's range, or of the next range
        once half of it is used. Nodes refuse writes above the limit, so it moves long before the numbers reach it.
        """
        return (self.last + _HALF_RANGE) | _RANGE

    def are_admitted_up_to(self, limit: int) -> bool:
        """Return whether a node with that limit admits all generations of the near future."""
        return limit - self.last >= _QUARTER_RANGE

    def issue(self, count: int = 1) -> int:
        """Issue `count` new generations. Return the first."""
        first = self.last + 1
        self.last += count
        return first


class EndedPut(NamedTuple):
    """Space of a put that ended without an object. With session 0 it is in PoolSpace._resting, too; `number` is that of
    its PutStart, 0 for none."""

    places: Sequence[Place]
    nbytes: int
    session: int
    number: int = 0


class PoolSpace:
    """Grants space. Owns every span that belongs to no object and to no unfinished put and is not free yet."""

    def __init__(self, segments: SegmentTable, generations: Generations, outcomes: Outcomes) -> None:
        self._segments = segments
        self._generations = generations
        self._outcomes = outcomes
        self._resting: list[tuple[float, int, Sequence[Place], int, int]] = []  # (free at, tie, where, nbytes, of put)
        self._count = 0
        self.of_puts: dict[int, EndedPut] = {}  # by generation
        self._of_calls: dict[int, dict[int, None]] = {}  # the generations in `of_puts`, by the number of the PutStart
        self._held: dict[int, dict[int, None]] = {}  # session -> generations of its ended puts
        self._ahead: set[int] = set()  # those of _held that were granted ahead: what a session stops does not free them
        self._stopped_up_to: dict[int, int] = {}  # session -> the highest generation that it no longer writes in place

    # granting

    def place(
        self,
        sizes: Sequence[int],
        num_replicas: int = 1,
        preferred: Sequence[str] = (),
        *,
        least: int = 1,
        avoid_nodes: Sequence[str] = (),
    ) -> list[list[Place]]:
        """Allocate space for each size, on up to `num_replicas` segments. An object that gets fewer than `least` places
        gets none: its list is empty.
        """
        places = self._segments.place_many(sizes, num_replicas, preferred, avoid_nodes)
        if least > 1:
            for at, found in enumerate(places):
                if len(found) < least:
                    self.free(found, sizes[at])
                    places[at] = []
        return places

    def stamp_one(self, places: Sequence[Place]) -> tuple[int, tuple[Placement, ...]]:
        """Do stamp() for one object, in half the time."""
        generation, by_number = self._generations.issue(), self._segments.by_number
        at = [(by_number[number].descriptor, offset) for number, offset in places]
        return generation, tuple([Placement(each.name, offset, each.incarnation, generation) for each, offset in at])

    def stamp(self, places: Sequence[Sequence[Place]]) -> tuple[list[int], list[tuple[Placement, ...]]]:
        """Issue a generation for the places of each object. Return the generations, and where to write each object."""
        first = self._generations.issue(len(places))
        generations = list(range(first, first + len(places)))
        by_number, placements = self._segments.by_number, []
        last_number, name, incarnation = 0, "", 0
        for found, generation in zip(places, generations, strict=True):
            stamped = []
            for number, offset in found:
                if number != last_number:
                    descriptor, last_number = by_number[number].descriptor, number
                    name, incarnation = descriptor.name, descriptor.incarnation
                stamped.append(Placement(name, offset, incarnation, generation))
            placements.append(tuple(stamped))
        return generations, placements

    # freeing

    def free(self, places: Sequence[Place], nbytes: int) -> None:
        """Free space that no process can still write or read."""
        for number, offset in places:
            self._segments.release(number, offset, nbytes)

    def free_at(self, until_s: float, places: Sequence[Place], nbytes: int, now_s: float) -> None:
        """Free the space at `until_s`, or now if that is past."""
        if until_s <= now_s:
            self.free(places, nbytes)
        elif places:
            self._push(until_s, places, nbytes, 0)

    def free_put_at(
        self, until_s: float, generation: int, places: Sequence[Place], nbytes: int, number: int = 0
    ) -> None:
        """Free the space of an ended put at `until_s`, or earlier if its writer reports that it has stopped."""
        self._remove_held(generation)
        self._add_put(generation, EndedPut(places, nbytes, 0, number))
        self._push(until_s, places, nbytes, generation)

    def hold_put(
        self,
        generation: int,
        places: Sequence[Place],
        nbytes: int,
        session: int,
        ahead: bool = False,
        number: int = 0,
    ) -> None:
        """Keep the space of an ended put that its process may still write in place, until the process reports that it
        has stopped, or has ended. With `ahead` only a report about this very space counts.
        """
        self._add_put(generation, EndedPut(places, nbytes, session, number))
        self._held.setdefault(session, {})[generation] = None
        if ahead:
            self._ahead.add(generation)

    def keep_unknown(self, until_s: float, places: Sequence[Place], nbytes: int) -> None:
        """Keep space that was granted by a journal which is lost, and free it at `until_s`. It is recorded under a
        generation of its own: another restart must not forget that its writer may still be at work.
        """
        generation = self._generations.issue()
        self.free_put_at(until_s, generation, places, nbytes)
        self._outcomes.add(HeldPut(generation, 0, list(places), nbytes))

    def free_unknown(self, session: int, known: Container[int], up_to: int) -> None:
        """Free what is held of space granted ahead, up to that generation, that its process does not know of: the
        answer to its call was lost, so no client has written there.
        """
        held = self._held.get(session)
        if held and self._ahead:
            self.free_puts([each for each in held if each in self._ahead and each <= up_to and each not in known])

    def stop_put(self, generation: int, until_s: float) -> None:
        """The process no longer writes this space, granted ahead, in place. Data that it sent over a network may still
        arrive, so it is freed at `until_s`.
        """
        if generation in self._ahead:
            kept = self.of_puts[generation]
            self.free_put_at(until_s, generation, kept.places, kept.nbytes)
            self._outcomes.add(HeldPut(generation, 0, list(kept.places), kept.nbytes))

    def free_puts(self, generations: Iterable[int]) -> None:
        """Free and record the space of these ended puts, whose writers have stopped. Skip those that have none."""
        freed = [generation for generation in generations if self._free_put(generation)]
        if freed:
            self._outcomes.add(Freed(freed))

    def free_puts_of(self, number: int) -> int:
        """Free and record the space of all ended puts of that PutStart: its client has not learned of it. Return how
        many there were."""
        generations = list(self._of_calls.get(number, ()))
        self.free_puts(generations)
        return len(generations)

    def on_session_gone(self, session: int) -> None:
        """Free what that process, which has ended, could have written in place."""
        self._stopped_up_to.pop(session, None)
        self.free_puts(list(self._held.get(session, ())))

    def on_session_stopped(self, session: int, up_to: int, until_s: float) -> None:
        """The process no longer writes puts up to that generation in place. Data that it sent over a network may still
        arrive, so their space is freed at `until_s`.
        """
        if up_to > self._stopped_up_to.get(session, 0):
            self._stopped_up_to[session] = up_to
        found = [each for each in self._held.get(session, ()) if each <= up_to and each not in self._ahead]
        for generation in found:
            kept = self.of_puts[generation]
            self.free_put_at(until_s, generation, kept.places, kept.nbytes, kept.number)
        if found:
            self._outcomes.add(LetGo(session, up_to))

    def free_due(self, now_s: float, limit: int) -> bool:
        """Free up to `limit` spans whose time has come, and record those of puts. Return whether there may be more."""
        done, generations = 0, []
        while done < limit and self._resting and self._resting[0][0] <= now_s:
            _, _, places, nbytes, generation = heapq.heappop(self._resting)
            done += 1
            if generation:
                generations.append(generation)
            else:
                self.free(places, nbytes)
        self.free_puts(generations)
        return done == limit

    # questions

    def stopped_up_to(self, session: int) -> int:
        """Return the highest generation that this process no longer writes in place."""
        return self._stopped_up_to.get(session, 0)

    def stopped_sessions(self) -> Iterable[tuple[int, int]]:
        """Return each session with its stopped_up_to()."""
        return self._stopped_up_to.items()

    def holding_sessions(self) -> list[int]:
        """Return the sessions for which space of ended puts is held."""
        return list(self._held)

    def spans(self) -> Iterator[tuple[Place, int]]:
        """Yield all space that is not free yet, with its size."""
        for _, _, places, nbytes, generation in self._resting:
            if not generation:
                for place in places:
                    yield place, nbytes
        for kept in self.of_puts.values():
            for place in kept.places:
                yield place, kept.nbytes

    def num_of_ended_puts(self, segment: int) -> int:
        """Return how many spans of that segment belong to puts that ended without an object. They are freed when their
        writers have stopped."""
        return sum(number == segment for kept in self.of_puts.values() for number, _ in kept.places)

    def is_ahead(self, generation: int) -> bool:
        """Return whether this is held space that was granted ahead."""
        return generation in self._ahead

    def _free_put(self, generation: int) -> bool:
        self._remove_held(generation)
        kept = self.of_puts.pop(generation, None)
        if kept is None:
            return False
        if kept.number:
            of_call = self._of_calls[kept.number]
            del of_call[generation]
            if not of_call:
                del self._of_calls[kept.number]
        self.free(kept.places, kept.nbytes)
        return True

    def _add_put(self, generation: int, kept: EndedPut) -> None:
        self.of_puts[generation] = kept
        if kept.number:
            self._of_calls.setdefault(kept.number, {})[generation] = None

    def _remove_held(self, generation: int) -> None:
        session = self.of_puts[generation].session if generation in self.of_puts else 0
        if session:
            held = self._held[session]
            del held[generation]
            self._ahead.discard(generation)
            if not held:
                del self._held[session]

    def _push(self, until_s: float, places: Sequence[Place], nbytes: int, generation: int) -> None:
        self._count += 1
        heapq.heappush(self._resting, (until_s, self._count, places, nbytes, generation))
