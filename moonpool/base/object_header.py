"""The header in front of every object's bytes in the pool (docs/formats.md, version 1).

    0   magic  "MPOB"        16  header_nbytes  u32    32  identity   32 bytes
    4   version      u16     20  num_pieces     u32    64  key_nbytes u16, then the key,
    6   checksum     u8      24  generation     u64        then num_pieces x {nbytes u64, checksum u32},
    7   kind         u8      12  valid_tokens   u32        then crc32c u32 over all of the above

The header is padded to a multiple of 4 KiB, so that the pieces behind it start on a page; they follow one
another without gaps. A reader checks magic, version, its own crc, key, identity and generation before it
touches a piece, and each piece's checksum before it uses it.

The last 8 bytes of the header's first page are the void mark: 0, or the replica's generation once it has left its
object. Only a reader that has not asked the master looks at it.

Thousands of small objects are read and written per call, so one struct per number of pieces and length of the key
reads or writes all fields of a header at once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import msgspec

from moonpool.base.checksum import ChecksumKind, crc32c
from moonpool.base.errors import Corrupt, IdentityMismatch, StaleGeneration

MAGIC = b"MPOB"
VERSION = 1
ALIGN_NBYTES = 4096
NO_IDENTITY = bytes(32)
GENERATION_AT = 24
GENERATION = struct.Struct("<Q")
_FIXED = struct.Struct("<4sHBBIIIIQ32sH")
_PIECE_NBYTES = 12
_CRC = struct.Struct("<I")
_AROUND_NBYTES = _FIXED.size + _CRC.size  # of a header without key and pieces
_SIZES = struct.Struct("<II40xH")  # header_nbytes, num_pieces, key_nbytes
_SIZES_AT = 16


VOID_AT = ALIGN_NBYTES - GENERATION.size


class ObjectKind(IntEnum):
    OPAQUE = 0
    BLOCK = 1


KINDS = frozenset(map(int, ObjectKind))
_CHECKSUM_KINDS = frozenset(map(int, ChecksumKind))
_CRC32C = int(ChecksumKind.CRC32C)


class Piece(msgspec.Struct, frozen=True, array_like=True):
    nbytes: int
    checksum: int


class ObjectHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a reader needs to trust the bytes behind it."""

    key: bytes
    generation: int
    pieces: tuple[Piece, ...]
    kind: ObjectKind = ObjectKind.OPAQUE
    identity: bytes = NO_IDENTITY
    valid_tokens: int = 0
    checksum_kind: ChecksumKind = ChecksumKind.CRC32C

    @property
    def nbytes(self) -> int:
        return header_nbytes(len(self.key), len(self.pieces))

    def piece_offset(self, index: int) -> int:
        """Where piece `index` starts, counted from the object's start."""
        return self.nbytes + sum(piece.nbytes for piece in self.pieces[:index])

    def pack(self) -> bytes:
        return pack_header(
            self.key,
            self.generation,
            [piece.nbytes for piece in self.pieces],
            [piece.checksum for piece in self.pieces],
            kind=self.kind,
            identity=self.identity,
            valid_tokens=self.valid_tokens,
            checksum_kind=self.checksum_kind,
        )

    def check(self, key: bytes, generation: int, identity: bytes | None) -> None:
        """Raise StaleGeneration unless this is the object `key` of that generation, IdentityMismatch unless its
        identity is `identity` (None: any).
        """
        _check_owner(self, key, generation, identity)


class HeaderFields(NamedTuple):
    """A header's fields as plain values, with the sizes and checksums of its pieces."""

    checksum_kind: int
    kind: int
    valid_tokens: int
    nbytes: int  # of the header itself, padded: where the first piece starts
    generation: int
    identity: bytes
    key: bytes
    sizes: tuple[int, ...]
    checksums: tuple[int, ...]

    def check(self, key: bytes, generation: int, identity: bytes | None) -> None:
        """As ObjectHeader.check()."""
        _check_owner(self, key, generation, identity)

    def header(self) -> ObjectHeader:
        return ObjectHeader(
            key=self.key,
            generation=self.generation,
            pieces=tuple(map(Piece, self.sizes, self.checksums)),
            kind=ObjectKind(self.kind),
            identity=self.identity,
            valid_tokens=self.valid_tokens,
            checksum_kind=ChecksumKind(self.checksum_kind),
        )


def _check_owner(header: ObjectHeader | HeaderFields, key: bytes, generation: int, identity: bytes | None) -> None:
    if header.generation != generation or header.key != key:
        raise StaleGeneration(f"the space of {key.hex()[:16]} was given to another object")
    if identity is not None and header.identity != identity:
        raise IdentityMismatch(f"{key.hex()[:16]} holds KV of another model, dtype or layout")


class _Layout(NamedTuple):
    """Headers with keys of one length and one number of pieces."""

    body: struct.Struct
    whole: struct.Struct  # with the checksum behind it
    nbytes: int
    padding: bytes


@lru_cache(maxsize=1024)
def _layout(key_nbytes: int, num_pieces: int) -> _Layout:
    body = struct.Struct(f"{_FIXED.format}{key_nbytes}s" + "QI" * num_pieces)
    whole = struct.Struct(body.format + "I")
    nbytes = -(-whole.size // ALIGN_NBYTES) * ALIGN_NBYTES
    return _Layout(body, whole, nbytes, bytes(nbytes - whole.size))


def header_nbytes(key_nbytes: int, num_pieces: int) -> int:
    """Return the padded header size for a key of that length and that many pieces."""
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
    checksum_kind: int = _CRC32C,
) -> bytes:
    """Return the padded header of an object whose pieces have these sizes and checksums."""
    assert len(identity) == len(NO_IDENTITY), "an identity digest is 32 bytes"
    body, _, nbytes, padding = _layout(len(key), len(sizes))
    if len(sizes) == 1:  # mostly
        pieces: Sequence[int] = (sizes[0], checksums[0])
    else:
        pieces = [number for piece in zip(sizes, checksums, strict=True) for number in piece]
    raw = body.pack(
        MAGIC,
        VERSION,
        checksum_kind,
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
    return raw + _CRC.pack(crc32c(raw)) + padding


def pack_single(
    key: bytes, generation: int, nbytes: int, checksum: int, kind: int, identity: bytes, valid_tokens: int
) -> tuple[bytes, bytes]:
    """Return the header of an object of one piece as pack_header() does, but its padding apart: all headers with keys
    of one length share it.
    """
    assert len(identity) == len(NO_IDENTITY), "an identity digest is 32 bytes"
    body, _, size, padding = _layout(len(key), 1)
    raw = body.pack(
        MAGIC,
        VERSION,
        _CRC32C,
        kind,
        0,
        valid_tokens,
        size,
        1,
        generation,
        identity,
        len(key),
        key,
        nbytes,
        checksum,
    )
    return raw + _CRC.pack(crc32c(raw)), padding


def announced_nbytes(buffer: bytes | bytearray | memoryview) -> int:
    """Return the size that a header states for itself: how much to read before `unpack`. Not verified yet."""
    if len(buffer) < _FIXED.size:
        raise Corrupt("object header is cut short")
    return int(_SIZES.unpack_from(buffer, _SIZES_AT)[0])


def read_fields(memory: bytes | bytearray | memoryview, offset: int = 0) -> HeaderFields:
    """Return the header at `offset`. Raise Corrupt when it is damaged or cut short."""
    room = len(memory) - offset
    if room < _FIXED.size:
        raise Corrupt("object header is cut short")
    size, count, key_nbytes = _SIZES.unpack_from(memory, offset + _SIZES_AT)
    used = _AROUND_NBYTES + key_nbytes + count * _PIECE_NBYTES
    if not used <= size < used + ALIGN_NBYTES or used > room:  # before a layout is made for nonsense
        raise Corrupt("object header sizes do not add up")
    _, whole, padded_nbytes, _ = _layout(key_nbytes, count)
    raw = bytes(memory[offset : offset + used])  # one moment's bytes for the fields and for their checksum
    magic, version, check, kind, _, tokens, size, num, generation, identity, key_size, key, *pieces = whole.unpack(raw)
    if magic != MAGIC or version != VERSION:
        raise Corrupt("no object header of a known version at this place")
    if size != padded_nbytes or num != count or key_size != key_nbytes:
        raise Corrupt("object header sizes do not add up")
    if pieces[-1] != crc32c(raw[:-4]):
        raise Corrupt("object header checksum does not match")
    if kind not in KINDS or check not in _CHECKSUM_KINDS:
        raise Corrupt("object header of an unknown kind")
    if count == 1:  # mostly
        sizes, checksums = (pieces[0],), (pieces[1],)
    else:
        sizes, checksums = tuple(pieces[:-1:2]), tuple(pieces[1:-1:2])
    return HeaderFields(check, kind, tokens, size, generation, identity, key, sizes, checksums)


def read_plain(
    memory: bytes | bytearray | memoryview,
    offset: int,
    key: bytes,
    generation: int,
    nbytes: int,
    identity: bytes | None,
) -> int | None:
    """Return the checksum of the only piece when the header at `offset` is that of the object `key` with this
    generation, a piece of `nbytes` and this identity (None: any), and of the usual kind: one page with a void mark,
    CRC-32C. None otherwise: then read_fields() tells what is there. It takes half the time of read_fields().
    """
    _, whole, _, _ = _layout(len(key), 1)
    used = whole.size
    raw = bytes(memory[offset : offset + used])  # one moment's bytes for the fields and for their checksum
    if used > VOID_AT or len(raw) < used:
        return None
    fields = whole.unpack(raw)
    magic, version, check, kind, _, _, size, num, found, whose, key_size, stored, piece_nbytes, checksum, crc = fields
    is_plain = (
        found == generation
        and stored == key
        and piece_nbytes == nbytes
        and (identity is None or whose == identity)
        and magic == MAGIC
        and (version, check, size, num, key_size) == (VERSION, _CRC32C, ALIGN_NBYTES, 1, len(key))
        and kind in KINDS
        and crc == crc32c(raw[:-4])
    )
    return int(checksum) if is_plain else None


def has_void_mark(key_nbytes: int, num_pieces: int) -> bool:
    """Return whether headers of this kind have room for the void mark: all but those of hundreds of pieces."""
    return _AROUND_NBYTES + key_nbytes + num_pieces * _PIECE_NBYTES <= VOID_AT


def is_void(memory: bytes | bytearray | memoryview, offset: int, generation: int) -> bool:
    """Return whether the replica of that generation, whose header is at `offset`, has left its object."""
    return bool(GENERATION.unpack_from(memory, offset + VOID_AT)[0] == generation)


def void(memory: memoryview, offset: int, generation: int) -> None:
    """Set the void mark of the replica whose header is at `offset`, if it has one."""
    _, num_pieces, key_nbytes = _SIZES.unpack_from(memory, offset + _SIZES_AT)
    if has_void_mark(key_nbytes, num_pieces):
        GENERATION.pack_into(memory, offset + VOID_AT, generation)


def unpack(buffer: bytes | bytearray | memoryview) -> ObjectHeader:
    """Return the header at the start of `buffer`. Raise Corrupt when it is damaged or cut short."""
    return read_fields(buffer).header()
