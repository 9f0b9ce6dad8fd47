"""The common part of policies that rank slots by columns: no queue to keep, so that a look-up touches none.

A look-up only notes its slots; the columns are brought up to date in one numpy step for many look-ups.

When victims are wanted, a sample of the candidates is ranked at once with numpy and the lowest part of it goes, lowest
first. With at most SAMPLE candidates the sample is all of them and the order is exact; above, it is that of the
sample, and the next sample is of others. A slot that the caller keeps is set aside until as many were removed or kept
as there are candidates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.master.policies.base import insert_each
from moonpool.master.policies.columns import Candidates, grow, view

SAMPLE = 2048
_MOST_PENDING = 8192
_MOST_RETURNING = 512  # become ready again at one time
_PART = 16  # one in so many of a sample goes before the next sample is taken


class SweepPolicy(ABC):
    def __init__(self) -> None:
        self._candidates = Candidates()
        self._present = bytearray()
        self._stamps = array("q")  # of the last insert or access, on the policy's own count
        self._pending = array("I")  # slots of look-ups not yet accounted for; of one look-up, parents last
        self._count = 0
        self._batch: list[tuple[int, int]] = []  # (slot, its stamp when ranked), the next to go last
        self._worst_rank = 0.0  # the highest rank that this batch lets go
        self._offered: int | None = None  # what victims() gave last, until it is removed
        self._left_to_pass = 0  # when so many more were removed or kept, those kept before become ready again

    @abstractmethod
    def insert(self, slot: int, parent: int | None, nbytes: int, fingerprint: int) -> None: ...

    def insert_many(
        self, slots: Sequence[int], parents: Sequence[int | None] | None, fingerprints: Sequence[int]
    ) -> None:
        insert_each(self, slots, parents, fingerprints)

    @abstractmethod
    def remove(self, slot: int) -> None: ...

    @abstractmethod
    def _account(self) -> None:
        """Brings the columns up to date with the pending look-ups, and forgets these."""
        ...

    @abstractmethod
    def _ranks(self, slots: NDArray[np.uint32]) -> NDArray[np.float64]:
        """The lowest goes first."""
        ...

    def access(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        if isinstance(slots, np.ndarray):
            self._pending.frombytes(slots[::-1].astype(np.uint32).tobytes())
        else:
            self._pending.extend(slots[::-1])
        if len(self._pending) > _MOST_PENDING:
            self._account()

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: int) -> bool:
        return slot < len(self._present) and bool(self._present[slot])

    def victims(self) -> Iterator[int]:
        if self._pending:
            self._account()
        kept: set[int] = set()
        all_returned = False
        while True:
            slot = self._next_ready()
            if slot is None:
                if all_returned:
                    break
                all_returned = True
                self._start_return()
            elif slot in kept:
                self._candidates.set_aside(slot)
            else:
                yield from self._offer(slot, kept)
        yield from self._held_back(kept)

    def check_integrity(self) -> None:
        self._candidates.check_integrity()
        assert self._count == self._present.count(1), "as many slots as were inserted and not removed"

    def _offer(self, slot: int, kept: set[int]) -> Iterator[int]:
        self._offered = slot
        yield slot
        if self._offered == slot and slot in self._candidates:
            kept.add(slot)
            self._candidates.set_aside(slot)
            self._pass_one()

    def _held_back(self, kept: set[int]) -> Iterator[int]:
        """What is no candidate, to be given when the caller has kept all that are."""
        return iter(())

    def _enter(self, slot: int) -> None:
        if slot >= len(self._present):
            self._reserve(slot)
        assert not self._present[slot], "the slot is in the policy already"
        self._present[slot] = 1
        self._count += 1

    def _reserve(self, slot: int) -> None:
        """Makes room in every column."""
        self._candidates.reserve(slot)
        grow(slot, self._present, self._stamps)

    def _leave(self, slot: int) -> None:
        assert self._present[slot], "the slot is not in the policy"
        if slot == self._offered:
            self._offered = None
        self._present[slot] = 0
        self._count -= 1
        self._candidates.discard(slot)
        self._pass_one()

    def _next_ready(self) -> int | None:
        while self._batch or self._refill():
            slot, stamp = self._batch.pop()
            if self._candidates.is_ready(slot) and self._stamps[slot] == stamp:
                return slot
        return None

    def _refill(self) -> bool:
        self._candidates.go_on_returning(_MOST_RETURNING)
        slots = self._candidates.sample(SAMPLE)
        if not len(slots):
            return False
        stamps, ranks = view(self._stamps)[slots], self._ranks(slots)
        num = len(slots) // _PART + 1
        self._worst_rank = float(np.partition(ranks, num - 1)[num - 1])
        # Of equals, the first in the sample: the same on every machine, as argpartition would not be.
        low = np.flatnonzero(ranks <= self._worst_rank)
        order = low[np.argsort(ranks[low], kind="stable")[:num][::-1]]
        self._batch = list(zip(slots[order].tolist(), stamps[order].tolist(), strict=True))
        return True

    def _pass_one(self) -> None:
        self._left_to_pass -= 1
        if self._left_to_pass < 0:
            self._start_return()

    def _start_return(self) -> None:
        self._candidates.start_return()
        self._left_to_pass = len(self._candidates)


class LeastRecentlyUsed(SweepPolicy):
    def __init__(self) -> None:
        super().__init__()
        self._clock = 0  # counts references

    def insert(self, slot: int, parent: int | None, nbytes: int, fingerprint: int) -> None:
        if self._pending:
            self._account()
        self._enter(slot)
        self._clock += 1
        self._stamps[slot] = self._clock
        self._candidates.add(slot)

    def remove(self, slot: int) -> None:
        if self._pending:
            self._account()
        self._leave(slot)

    def _account(self) -> None:
        pending, self._pending = self._pending, array("I")
        # Where a slot comes twice, the later stamp stays.
        view(self._stamps)[view(pending)] = np.arange(self._clock + 1, self._clock + 1 + len(pending))
        self._clock += len(pending)

    def _ranks(self, slots: NDArray[np.uint32]) -> NDArray[np.float64]:
        return view(self._stamps)[slots].astype(np.float64)
