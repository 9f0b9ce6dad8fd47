"""Values of hot objects that lie on other machines, kept in this process; bounded, pure, thread-safe.

An entry is the value of one put, told by the generations of its replicas. Whoever uses it first asks the master where
the object is: only if one of those generations is still there the bytes are the object's. So nothing stale is ever
served; what is saved is the moving of bytes. They were verified when they were read and lie in this process's own
memory since; they are not verified again.

Only what is read a second time within a window is let in, so that a scan does not push out what is hot. The entry that
was used least recently goes first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

WINDOW_KEYS = 16_384  # keys that are remembered as read once, at least


class RecentKeys:
    """Keys seen lately: at least the last `window`, at most twice as many."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._young or key in self._old

    def note(self, key: bytes) -> bool:
        """Whether it had been seen before."""
        if key in self._young:
            return True
        if len(self._young) >= self._window:
            self._old, self._young = self._young, set()
        self._young.add(key)
        return key in self._old


@dataclass(slots=True)
class _Entry:
    generations: frozenset[int]
    value: bytes


class ObjectCache:
    """At most `capacity_nbytes` of values."""

    def __init__(self, capacity_nbytes: int, window_keys: int = WINDOW_KEYS) -> None:
        self._capacity_nbytes = capacity_nbytes
        self._lock = threading.Lock()
        self._recent = RecentKeys(window_keys)
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._nbytes = 0
        self._counts = dict.fromkeys(
            ("cache_hits", "cache_hit_bytes", "cache_stale", "cache_admitted", "cache_evicted"), 0
        )

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def note_read(self, key: bytes) -> bool:
        """A read that was not served from here. True when its value should be offered by put()."""
        with self._lock:
            return self._recent.note(key)

    def get(self, key: bytes, generations: frozenset[int]) -> bytes | None:
        """The value, if it is that of one of the generations that the object has now; an older one is dropped."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if entry.generations.isdisjoint(generations):
                self._drop(key)
                self._counts["cache_stale"] += 1
                return None
            entry.generations = generations  # copies that were made or given up since
            self._entries.move_to_end(key)
            self._counts["cache_hits"] += 1
            self._counts["cache_hit_bytes"] += len(entry.value)
            return entry.value

    def put(self, key: bytes, generations: frozenset[int], value: bytes) -> None:
        """A value larger than the whole cache is not kept."""
        with self._lock:
            if key in self._entries:
                self._drop(key)
            if len(value) > self._capacity_nbytes:
                return
            self._entries[key] = _Entry(generations, value)
            self._nbytes += len(value)
            self._counts["cache_admitted"] += 1
            while self._nbytes > self._capacity_nbytes:
                self._drop(next(iter(self._entries)))
                self._counts["cache_evicted"] += 1

    def drop(self, key: bytes) -> None:
        with self._lock:
            if key in self._entries:
                self._drop(key)

    def counters(self) -> dict[str, int]:
        """cache_hits, cache_hit_bytes, cache_stale, cache_admitted, cache_evicted, and cache_bytes it holds now."""
        with self._lock:
            return {**self._counts, "cache_bytes": self._nbytes}

    def _drop(self, key: bytes) -> None:
        self._nbytes -= len(self._entries.pop(key).value)
