"""The base of policies that rank slots by columns, and the simplest of them, LRU. A look-up updates no queue.

A look-up only appends its slots to a list; the columns are updated in one numpy step for many look-ups.

For victims, a sample of the candidates is ranked with numpy and its lowest part is evicted, lowest first. With at most
SAMPLE candidates the sample is all of them and the order is exact; with more, the next sample has other candidates. A
slot that the caller keeps is set aside until as many were removed or kept as there are candidates.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.master.policies.base import OfferingPolicy
from moonpool.master.policies.columns import Candidates, grow, view

SAMPLE = 2048
_MOST_PENDING = 8192
_MOST_RETURNING = 512  # slots that become ready again at one time
_PART = 16  # 1/16 of a sample is evicted before the next sample is taken


class SweepPolicy(OfferingPolicy):
    def __init__(self) -> None:
        super().__init__()
        self._candidates = Candidates()
        self._present = bytearray()
        self._stamps = array("q")  # of the last insert or access, in the policy's own count
        self._count = 0
        self._batch: list[tuple[int, int]] = []  # (slot, its stamp when ranked), the next victim last
        self._worst_rank = 0.0  # the highest rank in this batch

    @abstractmethod
    def _ranks(self, slots: NDArray[np.uint32]) -> NDArray[np.float64]:
        """Return the ranks; the lowest is evicted first."""
        ...

    def access(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """See EvictionPolicy. Of one look-up, parents are pending last."""
        if isinstance(slots, np.ndarray):
            self._pending.frombytes(slots[::-1].astype(np.uint32).tobytes())
        else:
            self._pending.extend(slots[::-1])
        if len(self._pending) > _MOST_PENDING:
            self._apply_pending()

    def standing(self, slots: Sequence[int]) -> list[tuple[int, float | None]]:
        if self._pending:
            self._apply_pending()
        known = [slot for slot in slots if slot in self]
        ranks = dict(zip(known, self._ranks(np.array(known, np.uint32)).tolist(), strict=True)) if known else {}
        return [(self._num_uses(slot), ranks.get(slot)) for slot in slots]

    def _num_uses(self, slot: int) -> int:
        return 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: int) -> bool:
        return slot < len(self._present) and bool(self._present[slot])

    def check_integrity(self) -> None:
        self._candidates.check_integrity()
        assert self._count == self._present.count(1), "as many slots as were inserted and not removed"

    def _enter(self, slot: int) -> None:
        if slot >= len(self._present):
            self._reserve(slot)
        assert not self._present[slot], "the slot is in the policy already"
        self._present[slot] = 1
        self._count += 1

    def _reserve(self, slot: int) -> None:
        """Make room in every column."""
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
        # Of equal ranks the first in the sample: argpartition would choose differently on other machines.
        low = np.flatnonzero(ranks <= self._worst_rank)
        order = low[np.argsort(ranks[low], kind="stable")[:num][::-1]]
        self._batch = list(zip(slots[order].tolist(), stamps[order].tolist(), strict=True))
        return True

    def _is_candidate(self, slot: int) -> bool:
        return slot in self._candidates

    def _keep(self, slot: int) -> None:
        self._candidates.set_aside(slot)

    def _return_kept(self) -> None:
        self._candidates.start_return()
        self._left_to_pass = len(self._candidates)


class LeastRecentlyUsed(SweepPolicy):
    """Evicts what was stored or looked up longest ago, and of one look-up the end of the chain first.

    Exact with at most SAMPLE slots; with more, the oldest sixteenth of a fair sample.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clock = 0  # counts references

    def insert(self, slot: int, parent: int | None, nbytes: int, fingerprint: int) -> None:
        if self._pending:
            self._apply_pending()
        self._enter(slot)
        self._clock += 1
        self._stamps[slot] = self._clock
        self._candidates.add(slot)

    def remove(self, slot: int) -> None:
        if self._pending:
            self._apply_pending()
        self._leave(slot)

    def _apply_pending(self) -> None:
        pending, self._pending = self._pending, array("I")
        # If a slot is there twice, the later stamp stays.
        view(self._stamps)[view(pending)] = np.arange(self._clock + 1, self._clock + 1 + len(pending))
        self._clock += len(pending)

    def _ranks(self, slots: NDArray[np.uint32]) -> NDArray[np.float64]:
        return view(self._stamps)[slots].astype(np.float64)
