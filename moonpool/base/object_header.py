"""The header in front of every object's bytes in the pool (docs/formats.md, version 1).

    0   magic  "MPOB"        16  header_nbytes  u32    32  identity   32 bytes
    4   version      u16     20  num_pieces     u32    64  key_nbytes u16, then the key,
    6   checksum     u8      24  generation     u64        then num_pieces x {nbytes u64, checksum u32},
    7   kind         u8      12  valid_tokens   u32        then crc32c u32 over all of the above

The header is padded to a multiple of 4 KiB, so that the pieces behind it start on a page; they follow one
another without gaps. A reader checks magic, version, its own crc, key, identity and generation before it
touches a piece, and each piece's checksum before it uses it.
"""

from __future__ import annotations

import struct
from enum import IntEnum

import msgspec

from moonpool.base.checksum import ChecksumKind, crc32c
from moonpool.base.errors import Corrupt, IdentityMismatch, StaleGeneration

MAGIC = b"MPOB"
VERSION = 1
ALIGN_NBYTES = 4096
NO_IDENTITY = bytes(32)
_FIXED = struct.Struct("<4sHBBIIIIQ32sH")
_PIECE = struct.Struct("<QI")
_CRC = struct.Struct("<I")


class ObjectKind(IntEnum):
    OPAQUE = 0
    BLOCK = 1


_KINDS = frozenset(ObjectKind)
_CHECKSUM_KINDS = frozenset(ChecksumKind)


class Piece(msgspec.Struct, frozen=True, array_like=True):
    nbytes: int
    checksum: int


class ObjectHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a reader needs to check the bytes that follow."""

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
        """Return the offset of piece `index` from the object's start."""
        return self.nbytes + sum(piece.nbytes for piece in self.pieces[:index])

    def pack(self) -> bytes:
        assert len(self.identity) == len(NO_IDENTITY), "an identity digest is 32 bytes"
        size = self.nbytes
        out = bytearray(size)
        _FIXED.pack_into(
            out,
            0,
            MAGIC,
            VERSION,
            int(self.checksum_kind),
            int(self.kind),
            0,
            self.valid_tokens,
            size,
            len(self.pieces),
            self.generation,
            self.identity,
            len(self.key),
        )
        at = _FIXED.size
        out[at : at + len(self.key)] = self.key
        at += len(self.key)
        for piece in self.pieces:
            _PIECE.pack_into(out, at, piece.nbytes, piece.checksum)
            at += _PIECE.size
        _CRC.pack_into(out, at, crc32c(bytes(out[:at])))
        return bytes(out)

    def check(self, key: bytes, generation: int, identity: bytes | None) -> None:
        """Raise StaleGeneration unless this is the object `key` of that generation, IdentityMismatch unless its
        identity is `identity` (None: any).
        """
        if self.generation != generation or self.key != key:
            raise StaleGeneration(f"the space of {key.hex()[:16]} was given to another object")
        if identity is not None and self.identity != identity:
            raise IdentityMismatch(f"{key.hex()[:16]} holds KV of another model, dtype or layout")


def header_nbytes(key_nbytes: int, num_pieces: int) -> int:
    """Return the padded header size for a key of that length and that many pieces."""
    used = _FIXED.size + key_nbytes + num_pieces * _PIECE.size + _CRC.size
    return -(-used // ALIGN_NBYTES) * ALIGN_NBYTES


def announced_nbytes(buffer: bytes | bytearray | memoryview) -> int:
    """Return the size in the header, unchecked: how much to read before unpack()."""
    if len(buffer) < _FIXED.size:
        raise Corrupt("object header is cut short")
    return int(_FIXED.unpack_from(buffer)[6])


def unpack(buffer: bytes | bytearray | memoryview) -> ObjectHeader:
    """Return the header at the start of `buffer`. Corrupt when there is none or it is damaged."""
    view = memoryview(buffer)
    if len(view) < _FIXED.size:
        raise Corrupt("object header is cut short")
    magic, version, check, kind, _pad, tokens, size, count, generation, identity, key_nbytes = _FIXED.unpack_from(
        view, 0
    )
    if magic != MAGIC or version != VERSION:
        raise Corrupt("no object header of a known version at this place")
    end = _FIXED.size + key_nbytes + count * _PIECE.size
    if size != header_nbytes(key_nbytes, count) or len(view) < end + _CRC.size:
        raise Corrupt("object header sizes do not add up")
    if _CRC.unpack_from(view, end)[0] != crc32c(bytes(view[:end])):
        raise Corrupt("object header checksum does not match")
    if kind not in _KINDS or check not in _CHECKSUM_KINDS:
        raise Corrupt("object header of an unknown kind")
    key_end = _FIXED.size + key_nbytes
    pieces = tuple(Piece(*_PIECE.unpack_from(view, key_end + i * _PIECE.size)) for i in range(count))
    return ObjectHeader(
        key=bytes(view[_FIXED.size : key_end]),
        generation=generation,
        pieces=pieces,
        kind=ObjectKind(kind),
        identity=identity,
        valid_tokens=tokens,
        checksum_kind=ChecksumKind(check),
    )
