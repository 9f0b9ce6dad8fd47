"""Where bytes go: spans of a remote segment and the memory that belongs to each, cut and moved together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from moonpool.base.errors import InvalidInput
from moonpool.transfer.buffers import Buffer, as_bytes_view
from moonpool.transfer.foreign import DeviceSpan, device_span
from moonpool.transfer.transports.base import RemoteSegment, check_bounds

Memory: TypeAlias = memoryview | DeviceSpan  # a DeviceSpan is for transports that reach GPUs; others refuse it
Place: TypeAlias = tuple[int, Sequence[Memory]]  # an offset, and the memory of its bytes, one after the other

_NOTHING = memoryview(bytearray())


def as_memory(buffer: Buffer, writable: bool) -> Memory:
    """The caller's memory, borrowed; InvalidInput when it cannot be used."""
    try:
        return as_bytes_view(buffer, writable)
    except InvalidInput:
        span = device_span(buffer)
        if span is None or (writable and span.readonly):
            raise
        return span


def nbytes_of(memories: Sequence[Memory]) -> int:
    if len(memories) == 1:
        return memories[0].nbytes
    return sum(memory.nbytes for memory in memories)


def cut_memories(memories: Sequence[Memory], start: int, nbytes: int) -> list[Memory]:
    """The parts that hold bytes start .. start + nbytes of their concatenation."""
    parts: list[Memory] = []
    at = 0
    for memory in memories:
        low, high = max(start - at, 0), min(start + nbytes - at, memory.nbytes)
        if low < high:
            parts.append(memory[low:high])
        at += memory.nbytes
        if at >= start + nbytes:
            break
    return parts


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
            parts.append((offset + low, memories if whole else cut_memories(memories, low, high - low)))
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
    items = _items(places)
    if generation is None:
        remote.read_many(items, timeout_s=timeout_s)
    else:
        remote.write_many(items, generation=generation, timeout_s=timeout_s)


def _items(places: Sequence[Place]) -> list[tuple[int, Buffer]]:
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
