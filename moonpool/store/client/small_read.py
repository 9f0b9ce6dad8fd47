"""Small objects, read with as few calls as possible: for a few KiB the calls take longer than the bytes.

copy_small() reads one from mapped memory (small_batch.py many). SmallReads is the whole of a single get whose place is
remembered: no message on one machine, one round trip over tcp, and nothing made for batches. All use the checks of
verified_read.py; what fails one is read again in the general way (reads.py), which finds out what is wrong.
"""

from __future__ import annotations

import numpy as np

from moonpool.base.checksum import crc32c
from moonpool.base.errors import MoonpoolError, NotFound, StaleGeneration, Unauthorized, Unavailable
from moonpool.base.object_header import ALIGN_NBYTES, is_void, read_plain
from moonpool.store.client.read_tools import ReadTools
from moonpool.store.client.remembered import RememberedPlaces
from moonpool.store.client.verified_read import are_whole, check_header, has_generation, may_be_remembered
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer.transports.base import RemoteSegment

SMALL_NBYTES = 256 * 1024
SLICED_NBYTES = 16 * 1024  # a slice copies these faster than an array
_BYTE = np.uint8
_bytes_of = np.frombuffer


def copy_small(
    memory: memoryview,
    offset: int,
    info: ObjectInfo,
    place: Placement,
    identity: bytes | None,
    view: memoryview | None,
    is_remembered: bool,
) -> int | bytes | None:
    """Copy a small object from `offset` of the memory to `view`, which it fits, or to new bytes. Return the bytes or
    their number; None when a check failed. Raise what check_header() raises.
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
    if nbytes <= SLICED_NBYTES:
        view[:] = source
    else:
        _bytes_of(view, _BYTE)[...] = _bytes_of(source, _BYTE)
    return view


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
