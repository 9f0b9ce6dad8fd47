"""Reads of whole objects that go through the cache of hot remote ones (cache.py). Thread-safe.

A key that was never read before costs nothing more than without a cache. One that is in the cache costs a look-up and
no bytes. One that is about to be let in is looked up before and after it is read: if it has a generation in common, the
bytes are of that generation, for generations never come back. Objects in this machine's memory are not kept twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from moonpool.base.errors import MoonpoolError
from moonpool.store.client import StoreClient
from moonpool.store.client.cache import WINDOW_KEYS, ObjectCache, RecentKeys
from moonpool.store.client.cuts import scatter
from moonpool.store.client.directory import SegmentDirectory
from moonpool.store.messages import ObjectInfo
from moonpool.transfer.memory.buffers import Buffer, as_bytes_view
from moonpool.transfer.memory.location import host_id
from moonpool.transfer.transports.mapped import MappedRemote

T = TypeVar("T")
Lookup = Callable[[list[bytes]], list[ObjectInfo | None]]


class CachedReads:
    """Borrows everything. `lookup` leases what it finds, and is not counted as a read of this client."""

    def __init__(self, client: StoreClient, cache: ObjectCache, lookup: Lookup, directory: SegmentDirectory) -> None:
        self._client, self._cache = client, cache
        self._lookup, self._directory = lookup, directory
        self._here = RecentKeys(WINDOW_KEYS)  # keys found in this machine's memory: not worth a look for a while

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """As StoreClient.get_many."""
        return self._read(keys, lambda _, value: value, self._get, lambda _, value: value)

    def get_many_into(self, keys: Sequence[bytes], buffers: Sequence[Sequence[Buffer]]) -> list[int | MoonpoolError]:
        """As StoreClient.get_many_into."""
        targets = [[as_bytes_view(buffer, True) for buffer in some] for some in buffers]

        def fill(position: int, value: bytes) -> int | MoonpoolError:
            return _fill(value, targets[position])

        def read(positions: list[int]) -> list[int | MoonpoolError]:
            return self._client.get_many_into([keys[p] for p in positions], [targets[p] for p in positions])

        def value_of(position: int, got: int | MoonpoolError) -> bytes | None:
            return b"".join(targets[position])[:got] if isinstance(got, int) else None

        return self._read(keys, fill, lambda _, positions: read(positions), value_of)

    def _get(self, keys: Sequence[bytes], positions: list[int]) -> list[bytes | None]:
        return self._client.get_many([keys[position] for position in positions])

    def _read(
        self,
        keys: Sequence[bytes],
        use: Callable[[int, bytes], T],
        read: Callable[[Sequence[bytes], list[int]], list[T]],
        value_of: Callable[[int, T], bytes | None],
    ) -> list[T]:
        """Per position what `use` makes of a value from the cache, or what `read` gives for those that are not in it;
        `value_of` is the value that lies in what was read.
        """
        looked_up = self._look(keys)
        results: dict[int, T] = {}
        for position, generations in looked_up.items():
            value = self._cache.get(keys[position], generations)
            if value is not None:
                results[position] = use(position, value)
        rest = [position for position in range(len(keys)) if position not in results]
        for position, got in zip(rest, read(keys, rest) if rest else [], strict=True):
            results[position] = got
        fresh = {position: value_of(position, results[position]) for position in rest if position in looked_up}
        self._learn(keys, looked_up, {position: value for position, value in fresh.items() if value is not None})
        return [results[position] for position in range(len(keys))]

    def _look(self, keys: Sequence[bytes]) -> dict[int, frozenset[int]]:
        """By position the generations of those objects that the cache has or wants, and that lie elsewhere."""
        wanted = [position for position, key in enumerate(keys) if key in self._cache or self._is_wanted(key)]
        infos = self._lookup([keys[position] for position in wanted]) if wanted else []
        found: dict[int, frozenset[int]] = {}
        for position, info in zip(wanted, infos, strict=True):
            if info is None:
                self._cache.drop(keys[position])
            elif keys[position] in self._cache or not self._is_here(info):
                found[position] = _generations(info)
        return found

    def _is_wanted(self, key: bytes) -> bool:
        return key not in self._here and self._cache.note_read(key)

    def _is_here(self, info: ObjectInfo) -> bool:
        """Whether a replica lies in memory that this process has mapped: it is read from there as fast as from here."""
        for place in info.replicas:
            with contextlib.suppress(MoonpoolError):  # what cannot be reached is not here
                segment = self._directory.info(place)
                is_near = segment.descriptor.host == host_id()
                if is_near and isinstance(self._directory.open_segment(segment), MappedRemote):
                    self._here.note(info.key)
                    return True
        return False

    def _learn(self, keys: Sequence[bytes], before: dict[int, frozenset[int]], fresh: dict[int, bytes]) -> None:
        if not fresh:
            return
        for (position, value), info in zip(fresh.items(), self._lookup([keys[p] for p in fresh]), strict=True):
            if info is not None and not before[position].isdisjoint(_generations(info)):
                self._cache.put(keys[position], _generations(info), value)


def _generations(info: ObjectInfo) -> frozenset[int]:
    return frozenset(place.generation for place in info.replicas)


def _fill(value: bytes, targets: Sequence[memoryview]) -> int | MoonpoolError:
    try:
        (views,) = scatter([len(value)], targets)
    except MoonpoolError as error:
        return error
    source, at = memoryview(value), 0
    for view in views:
        view[:] = source[at : at + view.nbytes]
        at += view.nbytes
    return len(value)
