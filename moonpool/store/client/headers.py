"""Object headers by the thousand: the format of base/object_header.py, each read or written by one struct.

`glance` is for the good case only. Where it sees anything else than the object that was asked for it says None, and
base/object_header.py, field by field, finds out what is wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import google_crc32c

from moonpool.base.checksum import ChecksumKind
from moonpool.base.object_header import ALIGN_NBYTES, MAGIC, NO_IDENTITY, VERSION, ObjectKind, header_nbytes

_FIXED = "<4sHBBIIIIQ32sH"
_COUNT = struct.Struct("<I")
_COUNT_AT = 20
_CRC = struct.Struct("<I")
_LEAST_PIECE_NBYTES = 12
_CRC32C = int(ChecksumKind.CRC32C)
_KINDS = frozenset(map(int, ObjectKind))
GENERATION_AT = 24
GENERATION = struct.Struct("<Q")

_extend = google_crc32c.extend  # takes bytes and arrays as they are


class _Layout(NamedTuple):
    """Headers with keys of one length and one number of pieces."""

    body: struct.Struct
    whole: struct.Struct  # with the checksum behind it
    nbytes: int
    padding: bytes


class HeaderFields(NamedTuple):
    """What the pieces are: their sizes and checksums, one after the other from `start` on."""

    start: int
    sizes: tuple[int, ...]
    checksums: tuple[int, ...]


@lru_cache(maxsize=1024)
def _layout(key_nbytes: int, num_pieces: int) -> _Layout:
    body = struct.Struct(f"{_FIXED}{key_nbytes}s" + "QI" * num_pieces)
    whole = struct.Struct(body.format + "I")
    nbytes = header_nbytes(key_nbytes, num_pieces)
    return _Layout(body, whole, nbytes, bytes(nbytes - whole.size))


def padded_nbytes(key_nbytes: int, num_pieces: int) -> int:
    """header_nbytes, remembered."""
    return _layout(key_nbytes, num_pieces).nbytes


def pack_header(
    key: bytes,
    generation: int,
    sizes: Sequence[int],
    checksums: Sequence[int],
    *,
    kind: int = 0,
    identity: bytes = NO_IDENTITY,
    valid_tokens: int = 0,
) -> bytes:
    """As ObjectHeader.pack."""
    body, _, nbytes, padding = _layout(len(key), len(sizes))
    if len(sizes) == 1:  # mostly
        pieces: Sequence[int] = (sizes[0], checksums[0])
    else:
        pieces = [number for piece in zip(sizes, checksums, strict=True) for number in piece]
    raw = body.pack(
        MAGIC,
        VERSION,
        _CRC32C,
        kind,
        0,
        valid_tokens,
        nbytes,
        len(sizes),
        generation,
        identity,
        len(key),
        key,
        *pieces,
    )
    return raw + _CRC.pack(_extend(0, raw)) + padding


def glance(
    memory: memoryview, offset: int, nbytes: int, key: bytes, generation: int, identity: bytes | None
) -> HeaderFields | None:
    """The header of the object of `nbytes` at `offset`; None unless all of it is there, in order and as expected."""
    room = min(nbytes, memory.nbytes - offset)
    if room < ALIGN_NBYTES:
        return None
    (count,) = _COUNT.unpack_from(memory, offset + _COUNT_AT)
    if count * _LEAST_PIECE_NBYTES > nbytes:
        return None
    _, whole, header_size, _ = _layout(len(key), count)
    if header_size > room:
        return None
    raw = bytes(memory[offset : offset + whole.size])  # one moment's bytes for the fields and for their checksum
    magic, version, check, kind, _, _, size, num, found, whose, key_nbytes, found_key, *pieces = whole.unpack(raw)
    if (
        found != generation
        or found_key != key
        or magic != MAGIC
        or (version, check, size, num, key_nbytes) != (VERSION, _CRC32C, header_size, count, len(key))
        or (identity is not None and whose != identity)
        or kind not in _KINDS
        or pieces[-1] != _extend(0, raw[:-4])
    ):
        return None
    if count == 1:  # mostly
        sizes, checksums = (pieces[0],), (pieces[1],)
    else:
        sizes, checksums = tuple(pieces[:-1:2]), tuple(pieces[1:-1:2])
    return HeaderFields(header_size, sizes, checksums) if header_size + sum(sizes) == nbytes else None
