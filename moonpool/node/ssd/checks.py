"""Is this the object, whole? The same checks as on bytes from DRAM, over buffers of any cut. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.base import object_header
from moonpool.base.checksum import ChecksumKind, crc32c
from moonpool.base.errors import Corrupt, InvalidInput
from moonpool.base.object_header import ObjectHeader
from moonpool.transfer.memory.buffers import cut, total_nbytes

_PEEK_NBYTES = object_header.ALIGN_NBYTES


def check_header(views: Sequence[memoryview], key: bytes, generation: int) -> ObjectHeader:
    """The object's header. Corrupt when it is damaged, StaleGeneration when it is another object's, InvalidInput when
    the views are not as long as it says.
    """
    header = object_header.unpack(_header_bytes(views))
    header.check(key, generation, None)
    nbytes = header.nbytes + sum(piece.nbytes for piece in header.pieces)
    if nbytes != total_nbytes(views):
        raise InvalidInput(f"{key.hex()[:16]} has {nbytes} bytes by its header, not {total_nbytes(views)}")
    return header


def check_object(views: Sequence[memoryview], key: bytes, generation: int, crc: int | None) -> None:
    """As check_header(), and every piece: Corrupt when a checksum (`crc`: of the whole, if known) does not match."""
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
    """Without a copy where the header lies in one piece, as it mostly does."""
    first = _joined(cut(views, 0, _PEEK_NBYTES))
    wanted = object_header.announced_nbytes(first)
    return first if wanted <= len(first) else _joined(cut(views, 0, min(wanted, total_nbytes(views))))


def _joined(views: Sequence[memoryview]) -> bytes | memoryview:
    return views[0] if len(views) == 1 else b"".join(views)
