"""S3-FIFO: a small queue for new objects, a main queue, and ghosts of objects that were evicted.

After Yang et al., SOSP'23. New objects enter the small queue (a tenth of all). At its end objects that were looked up
move to the main queue and the others are evicted; an object that comes back while its ghost is stored enters the main
queue at once. At the end of the main queue an object that was looked up goes another round. Look-ups are only counted,
up to three; those of a slot between two inserts or removals count as one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.master.policies.base import OfferingPolicy
from moonpool.master.policies.columns import CHUNK_SLOTS, Ghosts, grow, view

_SMALL_PART = 10  # one in ten objects is in the small queue
_MAX_USES = 3
_MOST_PENDING, _FEW_PENDING = 8192, 24
_NONE, _SMALL, _MAIN = 0, 1, 2
_SMALL_ROOT, _MAIN_ROOT, _KEPT_SMALL_ROOT, _KEPT_MAIN_ROOT, _NUM_ROOTS = 0, 1, 2, 3, 4


class S3Fifo(OfferingPolicy):
    def __init__(self) -> None:
        super().__init__()
        self._queue_of = bytearray()  # by slot
        self._uses = bytearray()
        self._fingerprints = array("I")
        # Four linked rings in two columns: small, main, and the slots of each that the caller of victims() keeps. The
        # first indices are the roots; the index of a slot is slot + _NUM_ROOTS.
        self._newer, self._older = array("I"), array("I")
        self._num_small = self._num_main = 0
        self._clock = 0  # counts slots that left the small queue
        self._ghosts = Ghosts()
        self._reserve(0)
        for root in range(_NUM_ROOTS):
            self._newer[root] = self._older[root] = root

    def __len__(self) -> int:
        return self._num_small + self._num_main

    def __contains__(self, slot: int) -> bool:
        return slot < len(self._queue_of) and self._queue_of[slot] != _NONE

    def insert(self, slot: int, parent: int | None, nbytes: int, fingerprint: int) -> None:
        if self._pending:
            self._apply_pending()
        self._reserve(slot)
        assert self._queue_of[slot] == _NONE, "the slot is in the policy already"
        self._fingerprints[slot] = fingerprint
        self._uses[slot] = 0
        ghost = self._ghosts.pop(fingerprint, self._clock)
        known = ghost is not None and ghost[1] <= len(self)
        self._push(slot, _MAIN_ROOT if known else _SMALL_ROOT)

    def access(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        if isinstance(slots, np.ndarray):
            self._pending.frombytes(slots.astype(np.uint32).tobytes())
        else:
            self._pending.extend(slots)
        if len(self._pending) > _MOST_PENDING:
            self._apply_pending()

    def remove(self, slot: int) -> None:
        """Remove a slot that is gone or pinned. A pinned object has a ghost, so it returns to the main queue: it was in
        use.
        """
        assert self._queue_of[slot] != _NONE, "the slot is not in the policy"
        if self._pending:
            self._apply_pending()
        if slot == self._offered:
            self._offered = None
        self._clock += self._queue_of[slot] == _SMALL
        self._pull(slot)
        self._ghosts.put(self._fingerprints[slot], 0, self._clock)
        self._pass_one()

    def _is_candidate(self, slot: int) -> bool:
        return slot in self

    def _keep(self, slot: int) -> None:
        self._move(slot, _KEPT_SMALL_ROOT if self._queue_of[slot] == _SMALL else _KEPT_MAIN_ROOT)

    def _apply_pending(self) -> None:
        pending, self._pending = self._pending, array("I")
        if len(pending) <= _FEW_PENDING:
            for slot in pending:
                self._uses[slot] = min(self._uses[slot] + 1, _MAX_USES)
            return
        uses, slots = view(self._uses), view(pending)
        uses[slots] = np.minimum(uses[slots] + np.uint8(1), np.uint8(_MAX_USES))

    def check_integrity(self) -> None:
        num_small = self._walk(_SMALL_ROOT, _SMALL) + self._walk(_KEPT_SMALL_ROOT, _SMALL)
        assert num_small == self._num_small, "the small ring has as many slots as were pushed"
        num_main = self._walk(_MAIN_ROOT, _MAIN) + self._walk(_KEPT_MAIN_ROOT, _MAIN)
        assert num_main == self._num_main, "the main ring has as many slots as were pushed"
        assert len(self) == len(self._queue_of) - self._queue_of.count(_NONE), "every slot in a queue is in a ring"

    def _next_ready(self) -> int | None:
        """Move slots that were looked up on, until one is found that was not. Return it, None if there is none."""
        uses, oldest = self._uses, self._newer
        while True:
            main_is_empty = oldest[_MAIN_ROOT] == _MAIN_ROOT
            small_is_empty = oldest[_SMALL_ROOT] == _SMALL_ROOT
            if not small_is_empty and (main_is_empty or self._num_small * _SMALL_PART >= len(self)):
                slot = oldest[_SMALL_ROOT] - _NUM_ROOTS
                if not uses[slot]:
                    return slot
                uses[slot] = 0
            elif main_is_empty:
                return None
            else:
                slot = oldest[_MAIN_ROOT] - _NUM_ROOTS
                if not uses[slot]:
                    return slot
                uses[slot] -= 1
            self._move(slot, _MAIN_ROOT)

    # the rings: root.newer is the oldest slot, root.older the newest

    def _push(self, slot: int, root: int) -> None:
        newer, older, here = self._newer, self._older, slot + _NUM_ROOTS
        newest = older[root]
        older[here], newer[here] = newest, root
        newer[newest] = older[root] = here
        if root in (_SMALL_ROOT, _KEPT_SMALL_ROOT):
            self._queue_of[slot] = _SMALL
            self._num_small += 1
        else:
            self._queue_of[slot] = _MAIN
            self._num_main += 1

    def _pull(self, slot: int) -> None:
        older, newer = self._older[slot + _NUM_ROOTS], self._newer[slot + _NUM_ROOTS]
        self._newer[older], self._older[newer] = newer, older
        if self._queue_of[slot] == _SMALL:
            self._num_small -= 1
        else:
            self._num_main -= 1
        self._queue_of[slot] = _NONE

    def _move(self, slot: int, root: int) -> None:
        self._pull(slot)
        self._push(slot, root)

    def _return_kept(self) -> None:
        self._left_to_pass = len(self)
        self._append_ring(_KEPT_SMALL_ROOT, _SMALL_ROOT)
        self._append_ring(_KEPT_MAIN_ROOT, _MAIN_ROOT)

    def _append_ring(self, source: int, target: int) -> None:
        """Move all slots of one ring, in their order, to the newest end of the other."""
        newer, older = self._newer, self._older
        first, last, newest = newer[source], older[source], older[target]
        if first == source:
            return
        newer[newest], older[first] = first, newest
        newer[last], older[target] = target, last
        newer[source] = older[source] = source

    def _walk(self, root: int, queue: int) -> int:
        count, here = 0, self._newer[root]
        while here != root:
            assert self._queue_of[here - _NUM_ROOTS] == queue, "a slot knows its queue"
            assert self._older[self._newer[here]] == here, "links agree in both directions"
            count, here = count + 1, self._newer[here]
        return count

    def _reserve(self, slot: int) -> None:
        if slot < len(self._uses):
            return
        grow(slot, self._queue_of, self._uses, self._fingerprints)
        grow(slot + CHUNK_SLOTS, self._newer, self._older)  # the roots need room too
        size = Ghosts.size_for(4 * len(self._uses))  # many places, so that few ghosts collide
        if size > self._ghosts.size:
            self._ghosts = Ghosts(size)
