"""What the state keeps per object and per unfinished put, and the dict that holds ten million of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar
from zlib import crc32

from moonpool.store.eviction import Evictable
from moonpool.store.messages import Placement

V = TypeVar("V")
NUM_SHARDS = 1024


class StoredObject(Evictable):
    """A readable object. The policy orders it while nobody pins it."""

    __slots__ = ("generation", "hard_pinned", "key", "lease_until_s", "nbytes", "num_pins", "placements")

    def __init__(self, key: bytes, nbytes: int, generation: int, placements: tuple[Placement, ...]) -> None:
        self.key = key
        self.nbytes = nbytes
        self.generation = generation
        self.placements = placements
        self.lease_until_s = 0.0
        self.num_pins = 0  # held by connections
        self.hard_pinned = False  # by its writer's wish, until it is removed

    @property
    def evictable(self) -> bool:
        return self.num_pins == 0 and not self.hard_pinned


class PendingPut:
    """Space that was granted and is being written. Not visible, not evictable."""

    __slots__ = ("generation", "key", "nbytes", "pinned", "placements", "started_s")

    def __init__(
        self,
        key: bytes,
        nbytes: int,
        generation: int,
        placements: tuple[Placement, ...],
        pinned: bool,
        started_s: float,
    ) -> None:
        self.key = key
        self.nbytes = nbytes
        self.generation = generation
        self.placements = placements
        self.pinned = pinned
        self.started_s = started_s


class ShardedDict(Generic[V]):
    """A dict by key of many small dicts: none of them is large enough for its growth to be felt as a pause.

    The shard is a function of the key alone (hash() of bytes is not, from one process to the next), so that the
    order of a walk, and with it a replay, is the same everywhere.
    """

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        self._shards: list[dict[bytes, V]] = [{} for _ in range(NUM_SHARDS)]

    def get(self, key: bytes) -> V | None:
        return self._shards[crc32(key) % NUM_SHARDS].get(key)

    def __setitem__(self, key: bytes, value: V) -> None:
        self._shards[crc32(key) % NUM_SHARDS][key] = value

    def __delitem__(self, key: bytes) -> None:
        del self._shards[crc32(key) % NUM_SHARDS][key]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def shard(self, index: int) -> list[V]:
        """The values of one shard, as they are now."""
        return list(self._shards[index].values())

    def values(self) -> Iterator[V]:
        """Shard by shard; what is added or removed meanwhile may or may not be seen."""
        for shard in self._shards:
            if shard:
                yield from list(shard.values())
