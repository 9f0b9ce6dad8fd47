"""Keys whose places a power failure of the master may still undo. Pure.

A call is answered when its records are in the page cache, and the disk has them a moment later. If power fails in
between, the next master does not know of new objects and new replicas. A reader that remembered them would find them
after their key got another value from that master. So look-ups let no client remember an object before the record of
its latest place is on disk. They ask for a sync then, so that a later look-up may let it.

The journal's entries are counted from 1, which stands for all that a master has found in the journal at its start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

_MAX_KEYS = 65_536  # if the disk takes longer than this many, nothing is remembered until it has all of them


def _all_synced() -> int:
    return 1 << 62


def _do_nothing() -> None:
    return None


class UnsyncedKeys:
    """`keys` are those whose latest place is not on disk, as of the last call of update().

    `num_synced` returns how many entries are on disk; by default all are, at once. `sync_soon` asks for more of them.
    """

    def __init__(self) -> None:
        self.num_synced: Callable[[], int] = _all_synced
        self.sync_soon: Callable[[], None] = _do_nothing
        self.num_entries = 1  # that were written to the journal
        self._entry_of: dict[bytes, int] = {}  # the entry that has the key's latest place
        self.keys = self._entry_of.keys()
        self._by_entry: deque[tuple[int, Sequence[bytes]]] = deque()  # the same, oldest first
        self._all_up_to = 1  # all keys count as changed by this entry

    def add(self, keys: Sequence[bytes]) -> None:
        """The next entry has new places of these keys."""
        entry = self.num_entries + 1
        self._entry_of.update(dict.fromkeys(keys, entry))
        self._by_entry.append((entry, keys))
        if len(self._entry_of) > _MAX_KEYS:
            self.update()
        if len(self._entry_of) > _MAX_KEYS:
            self._entry_of.clear()
            self._by_entry.clear()
            self._all_up_to = entry

    def update(self) -> bool:
        """Forget the keys that are on disk by now. Return False if all keys count as not on disk."""
        num_synced = self.num_synced()
        while self._by_entry and self._by_entry[0][0] <= num_synced:
            entry, keys = self._by_entry.popleft()
            for key in keys:
                if self._entry_of.get(key) == entry:
                    del self._entry_of[key]
        return self._all_up_to <= num_synced
