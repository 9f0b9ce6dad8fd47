"""Where bytes go: spans of a remote segment and the memory that belongs to each, cut and moved together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from moonpool.transfer.memory.buffers import Buffer, Memory, cut
from moonpool.transfer.transports.base import RemoteSegment, check_bounds

Place: TypeAlias = tuple[int, Sequence[Memory]]  # an offset, and the memory of its bytes, one after the other

_NOTHING = memoryview(bytearray())


def nbytes_of(memories: Sequence[Memory]) -> int:
    if len(memories) == 1:
        return memories[0].nbytes
    return sum(memory.nbytes for memory in memories)


def cut_places(places: Sequence[Place], start: int, nbytes: int) -> list[Place]:
    """The parts that hold bytes start .. start + nbytes of all places, one after the other. With no bytes, the first
    place without its memory: there is still somebody to be asked whether that is allowed.
    """
    parts: list[Place] = []
    at = 0
    for offset, memories in places:
        own_nbytes = nbytes_of(memories)
        low, high = max(start - at, 0), min(start + nbytes - at, own_nbytes)
        if low < high:
            whole = high - low == own_nbytes
            parts.append((offset + low, memories if whole else cut(memories, low, high - low)))
        at += own_nbytes
        if at >= start + nbytes:
            break
    return parts or [(places[0][0], [])]


def check_places(places: Sequence[Place], segment_nbytes: int) -> int:
    """How many bytes they are; InvalidInput unless all lie inside the segment."""
    total_nbytes = 0
    for offset, memories in places:
        nbytes = nbytes_of(memories)
        check_bounds(offset, nbytes, segment_nbytes)
        total_nbytes += nbytes
    return total_nbytes


def move(remote: RemoteSegment, places: Sequence[Place], *, generation: int | None, timeout_s: float) -> None:
    """Writes with `generation`, or reads (None). Returns when all is moved; many places go together."""
    if len(places) == 1:
        offset, memories = places[0]
        if generation is None:
            remote.read_into(offset, memories, timeout_s=timeout_s)
        else:
            remote.write_from(offset, memories, generation=generation, timeout_s=timeout_s)
        return
    items = items_of(places)
    if generation is None:
        remote.read_many(items, timeout_s=timeout_s)
    else:
        remote.write_many(items, generation=generation, timeout_s=timeout_s)


def items_of(places: Sequence[Place]) -> list[tuple[int, Buffer]]:
    """One per piece of memory; a place without any keeps one, so that it is checked."""
    items: list[tuple[int, Buffer]] = []
    for offset, memories in places:
        if len(memories) == 1:
            items.append((offset, memories[0]))
            continue
        for memory in memories or (_NOTHING,):
            items.append((offset, memory))
            offset += memory.nbytes
    return items
