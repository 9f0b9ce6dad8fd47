"""What every eviction policy is: an order over slots, first to go first. Pure: no clock, no randomness, no I/O.

A slot is a small int that stands for one stored object; its owner uses it again for another one later. A policy only
orders: whether a slot may go (leases) is for the caller to say, and pinned objects are not in the policy at all. The
order is a function of the calls alone, so a replayed journal evicts what was evicted the first time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class EvictionPolicy(Protocol):
    """A slot is inserted once, accessed any number of times, removed once; then it may come again.

    Memory is bounded by the highest slot ever inserted; no call does work in proportion to the number of slots.
    """

    def insert(self, slot: int, parent: int | None, nbytes: int, fingerprint: int) -> None:
        """The object became evictable: stored, or unpinned.

        `parent` is the slot of the block that this one continues, when that is known and stored (pinned or not).
        `fingerprint` is 32 bits of the key, by which a policy recognises what it has seen before.
        """
        ...

    def insert_many(
        self, slots: Sequence[int], parents: Sequence[int | None] | None, fingerprints: Sequence[int]
    ) -> None:
        """insert() for each, in this order: new objects, under distinct slots that are not in the policy. A parent that
        is among them stands before its children.
        """
        ...

    def access(self, slots: Sequence[int] | NDArray[np.int64]) -> None:
        """One look-up that found these, in the caller's order: of a prefix chain, parents first. Pinned ones may be
        among them; ones that were never inserted may not."""
        ...

    def remove(self, slot: int) -> None:
        """The object is gone or pinned. The slot must be in the policy."""
        ...

    def victims(self) -> Iterator[int]:
        """The slots, the first to go first, each at most once.

        The caller may remove the slot just given, and others, before it asks for the next one. One that it keeps
        (leased) waits until about as many were removed or kept as there are slots, then it may be given again, by a
        later iteration.
        """
        ...

    def __contains__(self, slot: int) -> bool: ...

    def __len__(self) -> int: ...

    def check_integrity(self) -> None:
        """Raises AssertionError when the policy's columns disagree. Looks at every slot: for tests."""
        ...


def insert_each(
    policy: EvictionPolicy, slots: Sequence[int], parents: Sequence[int | None] | None, fingerprints: Sequence[int]
) -> None:
    """insert_many() for policies that gain nothing from knowing many at once."""
    for at, slot in enumerate(slots):
        policy.insert(slot, None if parents is None else parents[at], 0, fingerprints[at])
