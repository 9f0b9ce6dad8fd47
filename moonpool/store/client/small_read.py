"""Small objects, read with as few calls as possible: for a few KiB the calls take longer than the bytes.

copy_small() reads one from mapped memory, fetch_small() many of a batch from another machine. SmallReads is the whole
of a single get whose place is remembered: no message on one machine, one round trip over tcp, and nothing made for
batches. All use the checks of verified_read.py; what fails one is read again in the general way (reads.py), which finds
out what is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from moonpool.base.checksum import crc32c
from moonpool.base.errors import MoonpoolError, NotFound, StaleGeneration, Unauthorized, Unavailable
from moonpool.base.object_header import ALIGN_NBYTES, is_void, read_plain
from moonpool.store.client.read_tools import ReadTools, TimeFor
from moonpool.store.client.recovery import Targets
from moonpool.store.client.remembered import RememberedPlaces
from moonpool.store.client.verified_read import are_whole, check_header, has_generation, may_be_remembered
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer.transports.base import RemoteSegment

SMALL_NBYTES = 256 * 1024
FoundObject: TypeAlias = tuple[int, ObjectInfo, Placement]  # position, object, the replica to read
_BATCH_OBJECTS = 64
_SLICED_NBYTES = 16 * 1024  # a slice copies these faster than an array
_BYTE = np.uint8
_bytes_of = np.frombuffer


def has_room(info: ObjectInfo, targets: Targets, max_nbytes: int = SMALL_NBYTES) -> bool:
    """Return whether the object is small, not empty, and `targets` is new memory or one view that it fits."""
    nbytes = info.nbytes - ALIGN_NBYTES
    return 0 < nbytes <= max_nbytes and (targets is None or (len(targets) == 1 and targets[0].nbytes >= nbytes))


def copy_small(
    memory: memoryview,
    offset: int,
    info: ObjectInfo,
    place: Placement,
    identity: bytes | None,
    view: memoryview | None,
    is_remembered: bool,
) -> int | bytes | None:
    """Copy an object that has_room() from `offset` of the memory to `view`, or to new bytes. Return the bytes or their
    number; None when a check failed. Raise what check_header() raises.
    """
    generation, nbytes = place.generation, info.nbytes - ALIGN_NBYTES
    checksum = read_plain(memory, offset, info.key, generation, nbytes, identity)
    if checksum is None:
        header = check_header(memory, offset, info, place, identity)
        if is_remembered and not may_be_remembered(memory, offset, header):
            return None
        found = _copy_out(memory, offset + header.nbytes, info.nbytes - header.nbytes, view)
        is_whole = are_whole(header, found)
    else:
        if is_remembered and is_void(memory, offset, generation):
            return None
        found = _copy_out(memory, offset + ALIGN_NBYTES, nbytes, view)
        is_whole = crc32c(found) == checksum
    if not is_whole or not has_generation(memory, offset, generation):
        return None
    return found if type(found) is bytes else len(found)


def _copy_out(memory: memoryview, start: int, nbytes: int, view: memoryview | None) -> memoryview | bytes:
    """Copy bytes of the memory to the start of `view`, or to new bytes. Return the copy."""
    source = memory[start : start + nbytes]
    if view is None:
        return bytes(source)
    if view.nbytes != nbytes:
        view = view[:nbytes]
    if nbytes <= _SLICED_NBYTES:
        view[:] = source
    else:
        _bytes_of(view, _BYTE)[...] = _bytes_of(source, _BYTE)
    return view


def fetch_small(
    remote: RemoteSegment,
    found: Sequence[FoundObject],
    targets: Sequence[Targets],
    identity: bytes | None,
    *,
    is_remembered: bool,
    time_for: TimeFor,
) -> Iterator[tuple[int, int | bytes]]:
    """Read objects that has_room() from a segment whose owner checks generations. Yield the position of each that
    passed the checks, with its bytes or their number. Raise what the transfer raises.

    Each is received whole, in one piece of memory that is used again and again, and copied from there as if the segment
    were mapped: the copy takes a tenth of the time that two pieces of memory for each object take.
    """
    if not found:
        return
    batches = [found[at : at + _BATCH_OBJECTS] for at in range(0, len(found), _BATCH_OBJECTS)]
    room = memoryview(bytearray(max([sum([info.nbytes for _, info, _ in batch]) for batch in batches])))

    def orders() -> Iterator[list[tuple[int, memoryview, int]]]:
        for batch in batches:
            ends = list(accumulate([info.nbytes for _, info, _ in batch], initial=0))
            yield [
                (place.offset, room[start:end], place.generation)
                for (_, _, place), start, end in zip(batch, ends, ends[1:], strict=False)
            ]

    timeout_s = time_for(2 * room.nbytes)  # one batch is received while the next is under way
    with contextlib.closing(remote.read_expecting(orders(), timeout_s=timeout_s)) as arrivals:
        for stale, batch in zip(arrivals, batches, strict=True):  # in this order: else the arrivals would not end
            at = 0
            for number, (position, info, place) in enumerate(batch):
                into, start, at = targets[position], at, at + info.nbytes
                try:
                    view = None if into is None else into[0]
                    got = copy_small(room, start, info, place, identity, view, is_remembered)
                except MoonpoolError:  # a ReadSession finds out what is wrong
                    continue
                if got is not None and number not in stale:
                    yield position, got


class SmallReads:
    """Thread-safe."""

    def __init__(self, tools: ReadTools, remembered: RememberedPlaces) -> None:
        self._tools, self._remembered = tools, remembered

    def read(self, key: bytes, view: memoryview | None, identity: bytes | None) -> int | bytes | None:
        """Read one object into the memory, or into new bytes. Return its bytes, or their number. None when it is not
        small or does not fit, its place is not remembered, or it may have left its place: then it is not remembered any
        more.
        """
        remembered = self._remembered
        info = remembered.find_one(key, remembered.now_s())
        if info is None:
            return None
        nbytes = info.nbytes - ALIGN_NBYTES
        if not 0 < nbytes <= SMALL_NBYTES or (view is not None and view.nbytes < nbytes):
            return None
        replicas, directory = info.replicas, self._tools.directory
        place = replicas[0] if len(replicas) == 1 else directory.best_first(replicas)[0]
        try:
            remote = directory.open(place)
            memory = remote.view(0, remote.nbytes)
            if memory is not None:
                got = copy_small(memory, place.offset, info, place, identity, view, True)
            elif remote.checks_generation:
                got = self._fetch(remote, info, place, identity, view)
            else:
                return None
        except MoonpoolError as error:
            got = None
            if isinstance(error, Unavailable | NotFound | Unauthorized):
                directory.unreadable.add(place, error)
        now_s = remembered.now_s()
        if got is None or not remembered.is_valid(info, now_s):
            remembered.forget(key)
            return None
        self._tools.counters.add_hit(nbytes)
        remembered.used_one(info, now_s)
        return got

    def _fetch(
        self, remote: RemoteSegment, info: ObjectInfo, place: Placement, identity: bytes | None, into: memoryview | None
    ) -> int | bytes | None:
        """Read from a segment whose owner checks the generation; otherwise as copy_small()."""
        head, nbytes = memoryview(bytearray(ALIGN_NBYTES)), info.nbytes - ALIGN_NBYTES
        view = np.empty(nbytes, _BYTE).data if into is None else into[:nbytes]
        try:
            remote.read_unchanged(
                place.offset, (head, view), generation=place.generation, timeout_s=self._tools.time_for(nbytes)
            )
        except StaleGeneration:
            return None
        checksum = read_plain(head, 0, info.key, place.generation, nbytes, identity)
        if checksum is None:
            header = check_header(head, 0, info, place, identity)
            if header.nbytes != ALIGN_NBYTES or not may_be_remembered(head, 0, header) or not are_whole(header, view):
                return None
        elif crc32c(view) != checksum or is_void(head, 0, place.generation):
            return None
        return bytes(view) if into is None else nbytes
