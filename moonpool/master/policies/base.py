"""The interface of eviction policies: an order of slots, first victim first. Pure: no clock, no randomness, no I/O.

A slot is a small int that stands for one stored object; later it may stand for another one. A policy only orders: the
caller decides whether a slot may be evicted (leases), and hard-pinned objects are not in the policy. The order depends
only on the calls, so a replayed journal evicts the same objects.
"""

from __future__ import annotations

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

    def __contains__(self, slot: int) -> bool: ...

    def __len__(self) -> int: ...

    def check_integrity(self) -> None:
        """Raise AssertionError if the policy's columns disagree. Visits every slot: for tests."""
        ...


def insert_each(
    policy: EvictionPolicy, slots: Sequence[int], parents: Sequence[int | None] | None, fingerprints: Sequence[int]
) -> None:
    """insert_many() of policies that insert one by one."""
    for at, slot in enumerate(slots):
        policy.insert(slot, None if parents is None else parents[at], 0, fingerprints[at])
