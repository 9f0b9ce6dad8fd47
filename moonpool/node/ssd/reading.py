"""Reads objects from the log and checks them as reads from DRAM are checked. Neighbours are read by one system call.

Reading ahead in another thread while objects are checked was measured and is slower: the checksum holds the GIL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moonpool.base import object_header
from moonpool.base.checksum import ChecksumKind, crc32c
from moonpool.base.clock import Deadline
from moonpool.base.errors import Corrupt, InvalidInput, MoonpoolError, StaleGeneration
from moonpool.base.object_header import ObjectHeader
from moonpool.node.ssd.folder import LogFolder
from moonpool.node.ssd.layout import UNIT_NBYTES
from moonpool.node.ssd.types import LogLocation, LogRead
from moonpool.transfer.memory.buffers import as_bytes_views, cut, total_nbytes

_PEEK_NBYTES = object_header.ALIGN_NBYTES
_MERGED_NBYTES = 8 * 1024 * 1024


def check_header(views: Sequence[memoryview], key: bytes, generation: int) -> ObjectHeader:
    """Return the object's header. Corrupt when it is damaged, StaleGeneration when it is another object's, InvalidInput
    when the views' size differs from the size in the header.
    """
    header = object_header.unpack(_header_bytes(views))
    header.check(key, generation, None)
    nbytes = header.nbytes + sum(piece.nbytes for piece in header.pieces)
    if nbytes != total_nbytes(views):
        raise InvalidInput(f"{key.hex()[:16]} has {nbytes} bytes by its header, not {total_nbytes(views)}")
    return header


def check_object(views: Sequence[memoryview], key: bytes, generation: int, crc: int | None) -> None:
    """Do check_header(), and check every piece. Corrupt when a checksum (`crc`: of the whole object) does not match."""
    header = check_header(views, key, generation)
    if crc is not None and object_crc(views) != crc:
        raise Corrupt(f"checksum of {key.hex()[:16]} does not match")
    if header.checksum_kind is ChecksumKind.NONE:
        return
    at = header.nbytes
    for number, piece in enumerate(header.pieces):
        if object_crc(cut(views, at, piece.nbytes)) != piece.checksum:
            raise Corrupt(f"checksum of piece {number} of {key.hex()[:16]} does not match")
        at += piece.nbytes


def object_crc(views: Sequence[memoryview]) -> int:
    value = 0
    for view in views:
        value = crc32c(view, value)
    return value


def _header_bytes(views: Sequence[memoryview]) -> bytes | memoryview:
    """Return the header's bytes, without a copy when they are in one view, which is the common case."""
    first = _joined(cut(views, 0, _PEEK_NBYTES))
    wanted = object_header.announced_nbytes(first)
    return first if wanted <= len(first) else _joined(cut(views, 0, min(wanted, total_nbytes(views))))


def _joined(views: Sequence[memoryview]) -> bytes | memoryview:
    return views[0] if len(views) == 1 else b"".join(views)


class ReadPlace(NamedTuple):
    """One object to read: the position of its result, its location on disk, its memory."""

    position: int
    location: LogLocation
    views: list[memoryview]


def read_checked(folder: LogFolder, reads: Sequence[LogRead], timeout_s: float) -> list[MoonpoolError | None]:
    """Fill the buffers. Return None per read where the object was read and checked, else the error; the buffers of a
    failed read have no defined content. Raise InvalidInput when a read's buffers differ in size from its object.
    """
    deadline = Deadline(timeout_s)
    results: list[MoonpoolError | None] = [None] * len(reads)
    for group in _neighbours(_places(reads)):
        for place, error in zip(group, _fetch(folder, group, deadline), strict=True):
            results[place.position] = error or _check(reads[place.position], place.views)
    return results


def _places(reads: Sequence[LogRead]) -> list[ReadPlace]:
    places = []
    for position, read in enumerate(reads):
        views = as_bytes_views(read.buffers, writable=True)
        if total_nbytes(views) != read.location.nbytes or read.location.nbytes == 0:
            raise InvalidInput(f"buffers of {total_nbytes(views)} bytes for an object of {read.location.nbytes}")
        places.append(ReadPlace(position, read.location, views))
    return places


def _neighbours(places: list[ReadPlace]) -> Iterator[list[ReadPlace]]:
    """Yield groups of places without gaps between them, of a size that suits one system call."""
    group: list[ReadPlace] = []
    nbytes = 0
    for place in sorted(places, key=lambda place: place.location):
        if group and (nbytes + place.location.nbytes > _MERGED_NBYTES or not _touch(group[-1], place)):
            yield group
            group, nbytes = [], 0
        group.append(place)
        nbytes += place.location.nbytes
    if group:
        yield group


def _touch(one: ReadPlace, other: ReadPlace) -> bool:
    here, there = one.location, other.location
    return here.nbytes % UNIT_NBYTES == 0 and (here.file_number, here.offset + here.nbytes) == (
        there.file_number,
        there.offset,
    )


def _fetch(folder: LogFolder, group: list[ReadPlace], deadline: Deadline) -> list[MoonpoolError | None]:
    first = group[0].location
    try:
        with folder.borrow(first.file_number) as file:
            file.read(first.offset, [view for place in group for view in place.views], deadline)
    except MoonpoolError as error:
        if len(group) == 1:
            return [error]
        # One bad block must not take the neighbours with it.
        return [result for place in group for result in _fetch(folder, [place], deadline)]
    return [None] * len(group)


def _check(read: LogRead, views: list[memoryview]) -> MoonpoolError | None:
    try:
        check_object(views, read.key, read.generation, read.crc)
    except InvalidInput as error:
        return Corrupt(str(error))  # the header is another one than was written here
    except (Corrupt, StaleGeneration) as error:
        return error
    return None
