"""The fence of a segment: one generation per granule, which keeps late writers out, and ranges of generations that are
refused wherever they write.

A range is refused when a master has lost the end of its journal: it does not know what was granted then, so it may
believe in an object whose space such a grant has, and no stamp tells yet.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import InvalidInput, StaleGeneration

GENERATION_NBYTES = 8
NUM_REFUSED = 16  # ranges
_FIRST_RANGE = 2  # before the ranges: the highest refused generation, and how many ranges may be in use
NUM_REFUSED_CELLS = _FIRST_RANGE + 2 * NUM_REFUSED
_MAX_GENERATION = 2**64 - 1
_FEW = 8  # granules, up to which numpy takes longer than a loop
Spans: TypeAlias = list[tuple[int, int]]


class Fence:
    """One generation per granule of a segment. A write is admitted when no granule it touches is newer.

    Threads of one process see check and stamp as one step. Between processes that map the same table they are
    two, so a writer calls confirm() when its bytes are in place: two writers that raced cannot both succeed
    unseen, and the loser's bytes are never announced. Space is handed out in whole granules, else neighbours of
    different generations would keep each other out. A writer stamps before it looks whether it is refused, and refuse()
    is called before the stamps are read: so one of the two sees the other.

    `refused` has NUM_REFUSED_CELLS numbers: the highest refused generation, the number of ranges, and each range as
    (above, up to); a range up to 0 is none. None: they are in this process's own memory.
    """

    def __init__(
        self, table: NDArray[np.uint64], granule_nbytes: int, refused: NDArray[np.uint64] | None = None
    ) -> None:
        self.granule_nbytes = granule_nbytes
        self._few_nbytes = _FEW * granule_nbytes
        self._refused = (np.zeros(NUM_REFUSED_CELLS, dtype=np.uint64) if refused is None else refused).data
        self._table = table
        self._cells = table.data  # the same memory: reading one number is ten times faster than from an array
        self._raw = self._cells.cast("B")  # and as bytes: comparing and setting many equal cells is ten times faster
        self._lock = threading.Lock()
        self.limit = _MAX_GENERATION  # this process admits no write of a higher generation

    def admit(self, offset: int, nbytes: int, generation: int) -> None:
        """Stamp the touched granules with `generation`. Raise StaleGeneration, stamping none, if a granule is newer or
        the generation is refused or above the limit: a generation that was never given out would keep all later writers
        out. If the generation is refused meanwhile, the granules are stamped when this raises.
        """
        size, refused = self.granule_nbytes, self._refused
        if not (0 < nbytes <= self._few_nbytes and refused[0] < generation <= self.limit):
            self.admit_all([(offset, nbytes)], generation)
            return
        cells, granules = self._cells, range(offset // size, (offset + nbytes - 1) // size + 1)
        with self._lock:
            for at in granules:
                if cells[at] > generation:
                    raise self._stale(offset, cells[at], generation)
            for at in granules:
                cells[at] = generation
        if generation <= refused[0]:
            self._check_refused(offset, generation)

    def admit_all(self, spans: Sequence[tuple[int, int]], generation: int) -> None:
        """Call admit() for each (offset, nbytes), all or none."""
        touched = self._touched(spans, generation)
        if not touched:
            return
        refused = self._refused
        if not refused[0] < generation <= self.limit:
            self._check_limit(touched[0][0], generation)
            self._check_refused(touched[0][0], generation)
        with self._lock:
            for offset, first, end in touched:
                newest = self._newest(first, end)
                if newest > generation:
                    raise self._stale(offset, newest, generation)
            self._set(touched, generation)
        if generation <= refused[0]:
            self._check_refused(touched[0][0], generation)

    def confirm(self, offset: int, nbytes: int, generation: int) -> None:
        """For a writer: do check(), and raise StaleGeneration if the generation is refused."""
        if not (0 < nbytes <= self._few_nbytes and self._refused[0] < generation <= _MAX_GENERATION):
            self._check_refused(offset, generation)
            self.check(offset, nbytes, generation)
            return
        # As check() does: one call of a function takes longer than looking at a granule.
        size, cells = self.granule_nbytes, self._cells
        for at in range(offset // size, (offset + nbytes - 1) // size + 1):
            if cells[at] != generation:
                raise self._stale(offset, cells[at], generation)

    def confirm_all(self, spans: Sequence[tuple[int, int]], generation: int) -> None:
        """Call confirm() for each (offset, nbytes)."""
        for offset, nbytes in spans:
            self.confirm(offset, nbytes, generation)

    def check(self, offset: int, nbytes: int, generation: int) -> None:
        """Raise StaleGeneration unless every touched granule still carries `generation`."""
        size = self.granule_nbytes
        if 0 < nbytes <= self._few_nbytes and 0 <= generation <= _MAX_GENERATION:
            cells = self._cells
            for at in range(offset // size, (offset + nbytes - 1) // size + 1):
                if cells[at] != generation:
                    raise self._stale(offset, cells[at], generation)
            return
        for _, first, end in self._touched([(offset, nbytes)], generation):
            raw = self._raw[first * GENERATION_NBYTES : end * GENERATION_NBYTES]
            if bytes(raw) != _repeated(generation, end - first):
                raise self._stale(offset, self._newest(first, end), generation)

    def carries(
        self, offsets: NDArray[np.uint64], sizes: NDArray[np.uint64], generations: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """Return for each span, of at least one byte inside the segment, whether check() would pass."""
        granule_nbytes = np.uint64(self.granule_nbytes)
        firsts, lasts = offsets // granule_nbytes, (offsets + sizes - np.uint64(1)) // granule_nbytes
        found: NDArray[np.bool_] = self._table[firsts] == generations
        for step in range(1, int((lasts - firsts).max(initial=0)) + 1):
            found &= self._table[np.minimum(firsts + np.uint64(step), lasts)] == generations
        return found

    def admit_run(self, offset: int, stamps: NDArray[np.uint64]) -> bool:
        """Admit spans that follow each other from a granule's start on. `stamps` has the generation of each granule.
        Return False when one of them may be too old or refused: they are not checked one by one. None is stamped then,
        unless one may be refused meanwhile.
        """
        first, oldest, refused = offset // self.granule_nbytes, int(stamps.min()), self._refused
        if oldest <= refused[0]:
            return False
        with self._lock:
            if self._newest(first, first + len(stamps)) > oldest:
                return False
            self._table[first : first + len(stamps)] = stamps
        return oldest > refused[0]

    def has_run(self, offset: int, stamps: NDArray[np.uint64]) -> bool:
        """Return whether check() of each span would pass."""
        first = offset // self.granule_nbytes
        return np.array_equal(self._table[first : first + len(stamps)], stamps)

    def refuse(self, above: int, up_to: int) -> None:
        """For the owner: refuse writes of the generations above `above` and up to `up_to` from now on, in all processes
        that map this fence. Ranges that overlap become one. If there would be more than NUM_REFUSED, the two lowest
        become one with all between them.
        """
        cells = self._refused
        with self._lock:
            if above >= up_to:
                return
            places = range(_FIRST_RANGE, _FIRST_RANGE + 2 * cells[1], 2)
            known = sorted((cells[at], cells[at + 1], at) for at in places if cells[at + 1])
            joined = [each for each in known if each[0] <= up_to and each[1] >= above]
            if joined:
                self._join([*joined, (above, up_to, 0)])
            else:
                at = next((at for at in places if not cells[at + 1]), places.stop)
                if at == len(cells):
                    at = self._join(known[:2])
                cells[at], cells[at + 1] = above, up_to
                cells[1] = max(cells[1], (at - _FIRST_RANGE) // 2 + 1)
            cells[0] = max(cells[0], up_to)  # last: who sees it sees the range

    def _join(self, ranges: Sequence[tuple[int, int, int]]) -> int:
        """Make these ranges (above, up to, place or 0) one. Return a place that is free then.

        Others read the places upwards meanwhile and must find each refused generation, so the last place is widened
        before the others are freed.
        """
        cells = self._refused
        *freed, kept = sorted(at for _, _, at in ranges if at)
        cells[kept + 1] = max(up_to for _, up_to, _ in ranges)
        cells[kept] = min(above for above, _, _ in ranges)
        for at in freed:
            cells[at + 1] = 0
        return freed[0] if freed else 0

    def stamp(self, offset: int, nbytes: int, generation: int) -> None:
        """For the owner: give the touched granules to `generation`, whatever they carried."""
        touched = self._touched([(offset, nbytes)], generation)
        with self._lock:
            self._set(touched, generation)

    def generation_at(self, offset: int) -> int:
        return self._cells[offset // self.granule_nbytes]

    def spans_above(self, generation: int) -> list[tuple[int, int]]:
        """Return (offset, nbytes) of all space with a greater generation, in whole granules; neighbours are merged."""
        if generation >= _MAX_GENERATION:
            return []
        newer = np.concatenate(([False], self._table > np.uint64(generation), [False]))
        edges = np.flatnonzero(newer[1:] != newer[:-1]).reshape(-1, 2) * self.granule_nbytes
        return [(start, end - start) for start, end in edges.tolist()]

    def stamps_above(self, generation: int) -> list[tuple[int, int, int]]:
        """Return (offset, nbytes, stamp) of all space with a greater generation, in whole granules; neighbours with the
        same stamp are merged.
        """
        if generation >= _MAX_GENERATION:
            return []
        at = np.flatnonzero(self._table > np.uint64(generation))
        stamps = self._table[at]
        starts = np.flatnonzero(np.append(True, (np.diff(at) != 1) | (stamps[1:] != stamps[:-1]))[: len(at)])
        counts = np.diff(np.append(starts, len(at)))
        size = self.granule_nbytes
        runs = zip(at[starts].tolist(), counts.tolist(), stamps[starts].tolist(), strict=True)
        return [(first * size, count * size, stamp) for first, count, stamp in runs]

    def restamp(self, offset: int, nbytes: int, found: int, generation: int) -> None:
        """As stamp(), for those of the touched granules that still carry the stamp `found`."""
        with self._lock:
            for _, first, end in self._touched([(offset, nbytes)], generation):
                cells = self._table[first:end]
                cells[cells == np.uint64(found)] = generation

    def _check_limit(self, offset: int, generation: int) -> None:
        if generation > self.limit:
            raise StaleGeneration(
                f"a write of generation {generation} at offset {offset} is refused: no generation above {self.limit} "
                "was given out"
            )

    def _check_refused(self, offset: int, generation: int) -> None:
        if generation > self._refused[0]:
            return
        cells = iter(self._refused[_FIRST_RANGE : _FIRST_RANGE + 2 * self._refused[1]].tolist())
        for above, up_to in zip(cells, cells, strict=True):
            if above < generation <= up_to:
                raise StaleGeneration(
                    f"a write of generation {generation} at offset {offset} is refused: the master has lost the record "
                    "of this grant"
                )

    def _touched(self, spans: Sequence[tuple[int, int]], generation: int) -> list[tuple[int, int, int]]:
        """Return (offset, first granule, one past the last) of each span that is not empty."""
        if not 0 <= generation <= _MAX_GENERATION:
            raise InvalidInput(f"generation {generation} is not an unsigned 64-bit number")
        size = self.granule_nbytes
        return [(offset, offset // size, (offset + nbytes - 1) // size + 1) for offset, nbytes in spans if nbytes]

    def _newest(self, first: int, end: int) -> int:
        generation = self._cells[first]
        raw = self._raw[first * GENERATION_NBYTES : end * GENERATION_NBYTES]
        if bytes(raw) == _repeated(generation, end - first):  # most space is reused in the same size, or is new
            return generation
        return int(self._table[first:end].max())

    def _set(self, touched: Sequence[tuple[int, int, int]], generation: int) -> None:
        for _, first, end in touched:
            self._raw[first * GENERATION_NBYTES : end * GENERATION_NBYTES] = _repeated(generation, end - first)

    @staticmethod
    def _stale(offset: int, found: int, generation: int) -> StaleGeneration:
        return StaleGeneration(f"space at offset {offset} belongs to generation {found}, the write is of {generation}")


def _repeated(generation: int, count: int) -> bytes:
    """Return `count` cells of the table that all carry this generation."""
    return generation.to_bytes(GENERATION_NBYTES, sys.byteorder) * count


def make_fence(nbytes: int, granule_nbytes: int | None) -> Fence | None:
    """Return a fence in this process's own memory, all generations 0; None without granules."""
    if granule_nbytes is None:
        return None
    return Fence(np.zeros(num_granules(nbytes, granule_nbytes), dtype=np.uint64), granule_nbytes)


def num_granules(nbytes: int, granule_nbytes: int) -> int:
    return -(-nbytes // granule_nbytes)


def merge_spans(spans: Iterable[tuple[int, int]]) -> Spans:
    """Return what the spans cover: neighbours become one span, empty spans are dropped."""
    merged: Spans = []
    for offset, nbytes in spans:
        if nbytes:
            extend_spans(merged, offset, nbytes)
    return merged


def extend_spans(spans: Spans, offset: int, nbytes: int) -> None:
    """Append a span, or extend the last one if they are neighbours."""
    if spans and sum(spans[-1]) == offset:
        spans[-1] = (spans[-1][0], spans[-1][1] + nbytes)
    else:
        spans.append((offset, nbytes))
