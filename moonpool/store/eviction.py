"""Which objects go first when space is short. Pure; the order is a function of the calls alone.

A policy orders entries and nothing more: whether an entry may go (leases, pins) is for its owner to say. The
links live in the entries themselves, so ten million of them need no second dict that grows in one long step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Evictable:
    """Base of what a policy can order. The policy alone touches these slots."""

    __slots__ = ("newer", "older")

    newer: Evictable | None
    older: Evictable | None


E = TypeVar("E", bound=Evictable)


class EvictionPolicy(Protocol[E]):
    """An entry is inserted once, accessed any number of times, removed once; then it may come again."""

    def on_insert(self, entry: E) -> None: ...

    def on_access(self, entry: E) -> None: ...

    def on_remove(self, entry: E) -> None: ...

    def victims(self) -> Iterator[E]:
        """Entries, the first to go first. The entry just given may be removed before the next is asked for."""
        ...

    def __len__(self) -> int: ...

    def check_integrity(self) -> None:
        """Raises AssertionError when the links disagree."""
        ...


class LeastRecentlyUsed(Generic[E]):
    """The entry whose last insert or access is longest ago goes first. A ring of links around one root."""

    def __init__(self) -> None:
        self._root = Evictable()
        self._root.newer = self._root.older = self._root
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def on_insert(self, entry: E) -> None:
        self._link(entry)
        self._count += 1

    def on_access(self, entry: E) -> None:
        if entry is not self._root.older:  # the newest is where it belongs
            self._unlink(entry)
            self._link(entry)

    def on_remove(self, entry: E) -> None:
        self._unlink(entry)
        entry.newer = entry.older = None
        self._count -= 1

    def victims(self) -> Iterator[E]:
        entry = self._root.newer
        while entry is not self._root:
            assert entry is not None
            following = entry.newer
            yield entry  # type: ignore[misc]  # all but the root came in as E
            entry = following

    def check_integrity(self) -> None:
        count, entry = 0, self._root
        while True:
            following = entry.newer
            assert following is not None, "the ring has no end"
            assert following.older is entry, "links agree in both directions"
            if following is self._root:
                break
            count, entry = count + 1, following
        assert count == self._count, "the ring has as many entries as were inserted"

    # root.newer is the oldest entry and root.older the newest: the ring runs root, oldest ... newest, root.

    def _link(self, entry: Evictable) -> None:
        root = self._root
        newest = root.older
        assert newest is not None
        entry.older, entry.newer = newest, root
        newest.newer = root.older = entry

    def _unlink(self, entry: Evictable) -> None:
        older, newer = entry.older, entry.newer
        assert older is not None, "the entry is not in the ring"
        assert newer is not None
        older.newer, newer.older = newer, older
