"""The interface of eviction policies and their common loop: an order of slots, first victim first. Pure: no clock, no
randomness, no I/O.

A slot is a small int that stands for one stored object; later it may stand for another one. A policy only orders: the
caller decides whether a slot may be evicted (leases), and hard-pinned objects are not in the policy. The order depends
only on the calls, so a replayed journal evicts the same objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class EvictionPolicy(Protocol):
    """A slot is inserted once, accessed any number of times, removed once; then it may be inserted again.

    Memory is bounded by the highest slot ever inserted; no call does work in proportion to the number of slots.
    """

    def insert(self, slot: int, parent: int | None, nbytes: int, fingerprint: int) -> None:
        """Add an object that became evictable: it was stored or unpinned.

        `parent` is the slot of the block that this one continues, if that is known and stored (pinned or not).
        `fingerprint` is 32 bits of the key, by which a policy recognises objects it had before.
        """
        ...

    def insert_many(
        self, slots: Sequence[int], parents: Sequence[int | None] | None, fingerprints: Sequence[int]
    ) -> None:
        """Call insert() for each, in this order: new objects, under distinct slots that are not in the policy. A parent
        comes before its children.
        """
        ...

    def access(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """Count one look-up that found these, in the caller's order: of a prefix chain, parents first. Pinned objects
        are allowed; slots that were never inserted are not.
        """
        ...

    def remove(self, slot: int) -> None:
        """Remove an object that is gone or pinned. The slot must be in the policy."""
        ...

    def victims(self) -> Iterator[int]:
        """Yield the slots, the first victim first, each at most once.

        The caller may remove the slot just yielded, and others, before it asks for the next one. If the caller keeps a
        slot (leased), a later iteration may yield it again after about as many slots were removed or kept as there are.
        """
        ...

    def standing(self, slots: Sequence[int]) -> list[tuple[int, float | None]]:
        """Return for each slot how often it was used again, as far as the policy counts that, and its rank: the lowest
        among the candidates is evicted first. None: the policy has no ranks, or the slot is not in it."""
        ...

    def __contains__(self, slot: int) -> bool: ...

    def __len__(self) -> int: ...

    def check_integrity(self) -> None:
        """Raise AssertionError if the policy's columns disagree. Visits every slot: for tests."""
        ...


class OfferingPolicy(ABC):
    """The loop that all policies share: it offers one slot after the other, and keeps aside what the caller keeps.

    Look-ups are only collected in `_pending`, and applied before the next insert, removal or victim. A kept slot is
    ready again after as many slots were removed or kept as there are.
    """

    def __init__(self) -> None:
        self._pending = array("I")  # slots of look-ups not yet applied
        self._offered: int | None = None  # the slot that victims() yielded last, until it is removed
        self._left_to_pass = 0  # removals or keeps until the kept slots become ready again

    @abstractmethod
    def insert(self, slot: int, parent: int | None, nbytes: int, fingerprint: int) -> None: ...

    def insert_many(
        self, slots: Sequence[int], parents: Sequence[int | None] | None, fingerprints: Sequence[int]
    ) -> None:
        for at, slot in enumerate(slots):
            self.insert(slot, None if parents is None else parents[at], 0, fingerprints[at])

    @abstractmethod
    def remove(self, slot: int) -> None: ...

    def standing(self, slots: Sequence[int]) -> list[tuple[int, float | None]]:
        return [(0, None)] * len(slots)

    def victims(self) -> Iterator[int]:
        if self._pending:
            self._apply_pending()
        kept: set[int] = set()
        all_returned = False
        while True:
            slot = self._next_ready()
            if slot is None:
                if all_returned:
                    break
                all_returned = True
                self._return_kept()
            elif slot in kept:
                self._keep(slot)
            else:
                self._offered = slot
                yield slot
                if self._offered == slot and self._is_candidate(slot):
                    kept.add(slot)
                    self._keep(slot)
                    self._pass_one()
        yield from self._held_back(kept)

    def _pass_one(self) -> None:
        """Count a slot that was removed or kept."""
        self._left_to_pass -= 1
        if self._left_to_pass < 0:
            self._return_kept()

    @abstractmethod
    def _apply_pending(self) -> None:
        """Apply the pending look-ups to the columns, and clear them."""
        ...

    @abstractmethod
    def _next_ready(self) -> int | None:
        """Return the next victim among the slots that are not kept aside, None if there is none."""
        ...

    @abstractmethod
    def _is_candidate(self, slot: int) -> bool:
        """Return whether the slot can be offered as a victim."""
        ...

    @abstractmethod
    def _keep(self, slot: int) -> None:
        """Set a candidate aside."""
        ...

    @abstractmethod
    def _return_kept(self) -> None:
        """Let the slots set aside become ready again, and set `_left_to_pass` to the number of candidates."""
        ...

    def _held_back(self, kept: set[int]) -> Iterator[int]:
        """Yield slots that are not candidates, after the caller has kept all candidates."""
        return iter(())
