"""Places: parts of a remote segment, each with the memory that belongs to it; moved together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from moonpool.base.errors import InvalidInput, MoonpoolError, StaleGeneration
from moonpool.transfer.memory.buffers import Buffer, Memory
from moonpool.transfer.transports.base import RemoteSegment

Place: TypeAlias = tuple[int, Sequence[Memory]]  # an offset, and the memory of its bytes, one after the other

_NOTHING = memoryview(bytearray())


def move(remote: RemoteSegment, places: Sequence[Place], *, generation: int | None, timeout_s: float) -> None:
    """Write the places with `generation`, or read them (None). Many places go together, neighbours as one."""
    if len(places) == 1:
        offset, memories = places[0]
        if generation is None:
            remote.read_into(offset, memories, timeout_s=timeout_s)
        else:
            remote.write_from(offset, memories, generation=generation, timeout_s=timeout_s)
        return
    items = _items_of(places)
    if generation is None:
        remote.read_many(items, timeout_s=timeout_s)
    else:
        remote.write_many(items, generation=generation, timeout_s=timeout_s)


def write_places(
    remote: RemoteSegment, places: Sequence[Place], generations: Sequence[int], *, timeout_s: float
) -> dict[int, MoonpoolError]:
    """Write each place with its own generation and return the owner's refusals by position. Where all generations are
    equal a refusal is raised: it may be that of any place.
    """
    if generations.count(generations[0]) == len(generations):
        move(remote, places, generation=generations[0], timeout_s=timeout_s)
        return {}
    items = [(*place, generation) for place, generation in zip(places, generations, strict=True)]
    outcomes = remote.write_each(items, timeout_s=timeout_s)
    return {at: error for at, error in enumerate(outcomes) if error is not None}


def read_expecting(
    remote: RemoteSegment, places: Sequence[Place], generations: Sequence[int], *, timeout_s: float
) -> dict[int, MoonpoolError]:
    """Read the places; return StaleGeneration for those that did not keep their generation, by position."""
    items: list[tuple[int, Buffer, int]] = []
    for (offset, memories), generation in zip(places, generations, strict=True):
        if generation < 1:
            raise InvalidInput(f"a read expects generation 1 or greater, not {generation}")
        for memory in memories or (_NOTHING,):
            items.append((offset, memory, generation))
            offset += memory.nbytes
    refusals: dict[int, MoonpoolError] = {}
    for stale in remote.read_expecting([items], timeout_s=timeout_s):
        position_of = [at for at, (_, memories) in enumerate(places) for _ in memories or (_NOTHING,)] if stale else []
        for at in stale:
            offset, _, generation = items[at]
            refusals[position_of[at]] = StaleGeneration(
                f"space at offset {offset} does not carry generation {generation}, or lost it while it was read"
            )
    return refusals


def _items_of(places: Sequence[Place]) -> list[tuple[int, Buffer]]:
    """Return one item per piece of memory; a place without memory keeps one, so that it is checked."""
    items: list[tuple[int, Buffer]] = []
    for offset, memories in places:
        if len(memories) == 1:
            items.append((offset, memories[0]))
            continue
        for memory in memories or (_NOTHING,):
            items.append((offset, memory))
            offset += memory.nbytes
    return items
