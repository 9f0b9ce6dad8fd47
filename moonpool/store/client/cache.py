"""A cache of hot objects of other machines, in this process, and the reads that use it. Bounded, thread-safe.

An entry is the value of one put, identified by the generations of its replicas. Before a reader uses it, the reader
asks the master where the object is: the entry is valid only if one of its generations is still there. So no stale value
is served; the cache saves the transfer of bytes, not the look-up. The bytes were verified when they were read.

ObjectCache admits a value at its second read within a window, so that a scan does not evict hot values. It evicts the
least recently used entry first.

CachedReads adds no call for a key that is read the first time. A value to be admitted is looked up before and after it
is read: generations never come back, so if both look-ups share a generation, the bytes are of that generation. Objects
in this machine's memory are not cached.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.base.errors import MoonpoolError
from moonpool.store.client.cuts import scatter
from moonpool.store.client.master_client import MasterClient
from moonpool.store.client.read_tools import ReadTools
from moonpool.store.client.reads import ClientReads
from moonpool.store.client.recovery import Got, Targets
from moonpool.store.messages import ObjectInfo
from moonpool.transfer.memory.location import host_id
from moonpool.transfer.transports.mapped import MappedRemote

WINDOW_KEYS = 16_384  # remember at least this many keys that were read once


class RecentKeys:
    """The last `window` keys, at least; at most twice as many."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._young or key in self._old

    def add(self, key: bytes) -> bool:
        """Add the key. Return whether it was there before."""
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
    """Least recently used values, at most `capacity_nbytes`. Thread-safe."""

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

    def add_read(self, key: bytes) -> bool:
        """Record a read that missed the cache. Return True when its value should be added by put()."""
        with self._lock:
            return self._recent.add(key)

    def get(self, key: bytes, generations: frozenset[int]) -> bytes | None:
        """Return the value if it is of one of these generations, which the object has now; drop it if it is older."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            if entry.generations.isdisjoint(generations):
                self._drop(key)
                self._counts["cache_stale"] += 1
                return None
            entry.generations = generations  # replicas may have been made or removed since
            self._entries.move_to_end(key)
            self._counts["cache_hits"] += 1
            self._counts["cache_hit_bytes"] += len(entry.value)
            return entry.value

    def put(self, key: bytes, generations: frozenset[int], value: bytes) -> None:
        """Add a value, unless it is larger than the whole cache."""
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
        """cache_hits, cache_hit_bytes, cache_stale, cache_admitted, cache_evicted, and cache_bytes held now."""
        with self._lock:
            return {**self._counts, "cache_bytes": self._nbytes}

    def _drop(self, key: bytes) -> None:
        self._nbytes -= len(self._entries.pop(key).value)


class CachedReads(ClientReads):
    """ClientReads whose read() uses the cache."""

    def __init__(self, master: MasterClient, tools: ReadTools, cache: ObjectCache) -> None:
        # A value is cached with the generations that look-ups around its read found, so the read itself must be as new.
        super().__init__(master, tools, max_remembered=0)
        self._cache = cache
        self._here = RecentKeys(WINDOW_KEYS)  # keys found in this machine's memory: not looked up again for a while

    def read(self, keys: Sequence[bytes], targets: Sequence[Targets], identity: bytes | None) -> list[Got]:
        """As ClientReads.read(). A read with an identity does not use the cache, which has values of any identity."""
        if identity is not None:
            return super().read(keys, targets, identity)
        looked_up = self._look(keys)
        results: dict[int, Got] = {}
        for position, generations in looked_up.items():
            value = self._cache.get(keys[position], generations)
            if value is not None:
                results[position] = _fill(value, targets[position])
        rest = [position for position in range(len(keys)) if position not in results]
        if rest:
            got = super().read([keys[position] for position in rest], [targets[position] for position in rest], None)
            results.update(zip(rest, got, strict=True))
        fresh = {p: _value(results[p], targets[p]) for p in rest if p in looked_up}
        self._learn(keys, looked_up, {position: value for position, value in fresh.items() if value is not None})
        return [results[position] for position in range(len(keys))]

    def _look(self, keys: Sequence[bytes]) -> dict[int, frozenset[int]]:
        """Return by position the generations of objects of other machines that the cache has, or should admit."""
        wanted = [position for position, key in enumerate(keys) if key in self._cache or self._is_wanted(key)]
        infos = self.find([keys[position] for position in wanted]) if wanted else []
        found: dict[int, frozenset[int]] = {}
        for position, info in zip(wanted, infos, strict=True):
            if info is None:
                self._cache.drop(keys[position])
            elif keys[position] in self._cache or not self._is_here(info):
                found[position] = _generations(info)
        return found

    def _is_wanted(self, key: bytes) -> bool:
        return key not in self._here and self._cache.add_read(key)

    def _is_here(self, info: ObjectInfo) -> bool:
        """Return whether a replica is in mapped memory: reading it is as fast as reading the cache."""
        for place in info.replicas:
            with contextlib.suppress(MoonpoolError):  # a segment that cannot be reached is not mapped
                segment = self.tools.directory.info(place)
                is_near = segment.descriptor.host == host_id()
                if is_near and isinstance(self.tools.directory.open_segment(segment), MappedRemote):
                    self._here.add(info.key)
                    return True
        return False

    def _learn(self, keys: Sequence[bytes], before: dict[int, frozenset[int]], fresh: dict[int, bytes]) -> None:
        if not fresh:
            return
        for (position, value), info in zip(fresh.items(), self.find([keys[p] for p in fresh]), strict=True):
            if info is not None and not before[position].isdisjoint(_generations(info)):
                self._cache.put(keys[position], _generations(info), value)


def _generations(info: ObjectInfo) -> frozenset[int]:
    return frozenset(place.generation for place in info.replicas)


def _fill(value: bytes, targets: Targets) -> Got:
    """Copy the value into the targets and return its size, or return the value if there are none."""
    if targets is None:
        return value
    try:
        (views,) = scatter([len(value)], targets)
    except MoonpoolError as error:
        return error
    source, at = memoryview(value), 0
    for view in views:
        view[:] = source[at : at + view.nbytes]
        at += view.nbytes
    return len(value)


def _value(got: Got, targets: Targets) -> bytes | None:
    """Return the bytes that were read; None after an error."""
    if isinstance(got, int) and targets is not None:
        return b"".join(targets)[:got]
    return got if isinstance(got, bytes) else None
