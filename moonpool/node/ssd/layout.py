"""The format of a log file. No I/O.

    block 0      file header: number, size, a random nonce
    batches      batch header (entries), then the objects with the same bytes as in DRAM, each at a 4 KiB boundary
    nothing      never written, or left from an earlier use of the file
    index        written when the file is sealed: all entries once more
    last block   trailer: where the index is

A block is 4 KiB, numbers are little-endian, entries are msgpack. Headers and trailer carry the file's nonce and a
crc32c. The nonce distinguishes a header from an object's bytes that look like one, and the current use of a file from
an earlier one: no client can know it beforehand. Index and trailer are written when all batches are durable, so a
good trailer says that nothing in the file is torn.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from moonpool import __version__
from moonpool.base.checksum import crc32c
from moonpool.base.errors import ConfigError
from moonpool.base.object_header import ALIGN_NBYTES

UNIT_NBYTES = ALIGN_NBYTES
VERSION = 1
BATCH_MAGIC = b"MPLB"
NONCE_NBYTES = 16
EMPTY_INDEX_NBYTES = 5  # an array's own header, at most
_FILE_MAGIC = b"MPLF"
_TRAILER_MAGIC = b"MPLT"
_FILE = struct.Struct("<4sHxxQQ16s")
_BATCH = struct.Struct("<4sHxxQQII16s")
_TRAILER = struct.Struct("<4sHxxQQQI4x16s")
_CRC = struct.Struct("<I")
_ENTRY_BOUND_NBYTES = 48  # an entry without its key, at most


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One record of the log: an object, or (nbytes is None) a tombstone, whose offset is that of its batch.

    Of a key's records the one of the highest (generation, file, offset) counts. `crc` covers an object whose own
    header has no checksums.
    """

    key: bytes
    generation: int
    file_number: int
    offset: int
    nbytes: int | None
    crc: int | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        return self.generation, self.file_number, self.offset

    @property
    def padded_nbytes(self) -> int:
        return 0 if self.nbytes is None else pad(self.nbytes)


class FileHeader(NamedTuple):
    number: int
    file_nbytes: int
    nonce: bytes


class BatchHead(NamedTuple):
    """The sizes in a batch's first block, before its checksum is checked."""

    header_nbytes: int
    batch_nbytes: int


class Trailer(NamedTuple):
    index_offset: int
    index_nbytes: int
    index_crc: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Entry])


def pad(nbytes: int) -> int:
    return -(-nbytes // UNIT_NBYTES) * UNIT_NBYTES


def entry_bound_nbytes(key_nbytes: int) -> int:
    """Return the largest encoded size of an entry with such a key."""
    return key_nbytes + _ENTRY_BOUND_NBYTES


def batch_header_bound_nbytes(entries_nbytes: int) -> int:
    return pad(_BATCH.size + EMPTY_INDEX_NBYTES + entries_nbytes + _CRC.size)


def footer_bound_nbytes(index_nbytes: int) -> int:
    """Return the size of index and trailer at the end of a file."""
    return pad(index_nbytes) + UNIT_NBYTES


def pack_file_header(header: FileHeader) -> bytes:
    return _sealed(_FILE.pack(_FILE_MAGIC, VERSION, header.number, header.file_nbytes, header.nonce), UNIT_NBYTES)


def parse_file_header(block: memoryview, number: int) -> FileHeader | None:
    """Return the header; None unless it is the header of that file. ConfigError when a newer Moonpool wrote it."""
    if not _is_whole(block, _FILE.size):
        return None
    magic, version, found_number, file_nbytes, nonce = _FILE.unpack_from(block)
    if magic != _FILE_MAGIC or found_number != number:
        return None
    if version != VERSION:
        raise ConfigError(
            f"log file {number} has format {version}, and this is Moonpool {__version__}, which reads format {VERSION};"
            " start the Moonpool that wrote it, or name another folder (--ssd)",
            param="ssd_dir",
        )
    return FileHeader(number, file_nbytes, nonce)


def pack_batch_header(entries: Sequence[Entry], offset: int, header_nbytes: int, end: int, nonce: bytes) -> bytes:
    body = _encoder.encode(entries)
    fixed = _BATCH.pack(BATCH_MAGIC, VERSION, offset, end - offset, header_nbytes, len(body), nonce)
    return _sealed(fixed + body, header_nbytes)


def peek_batch(block: memoryview, offset: int, header: FileHeader) -> BatchHead | None:
    """Return how much to read before parse_batch(); None when no batch of this file begins here."""
    magic, version, at, batch_nbytes, header_nbytes, body_nbytes, nonce = _BATCH.unpack_from(block)
    if magic != BATCH_MAGIC or version != VERSION or at != offset or nonce != header.nonce:
        return None
    fits = _BATCH.size + body_nbytes + _CRC.size <= header_nbytes <= batch_nbytes <= header.file_nbytes - offset
    if not fits or header_nbytes % UNIT_NBYTES or batch_nbytes % UNIT_NBYTES:
        return None
    return BatchHead(header_nbytes, batch_nbytes)


def parse_batch(blocks: memoryview, offset: int, header: FileHeader) -> list[Entry] | None:
    """Return the entries from the `header_nbytes` that peek_batch() found; None when they are damaged."""
    head = peek_batch(blocks, offset, header)
    if head is None:
        return None
    body_nbytes: int = _BATCH.unpack_from(blocks)[5]
    if not _is_whole(blocks, _BATCH.size + body_nbytes):
        return None
    entries = _decode(blocks[_BATCH.size : _BATCH.size + body_nbytes], header.number)
    if entries is None or not all(_lies_within(entry, offset, offset + head.batch_nbytes) for entry in entries):
        return None
    return entries


def pack_footer(entries: Sequence[Entry], header: FileHeader) -> tuple[int, bytes]:
    """Return offset and bytes of index and trailer."""
    body = _encoder.encode(entries)
    offset = header.file_nbytes - footer_bound_nbytes(len(body))
    fixed = _TRAILER.pack(_TRAILER_MAGIC, VERSION, header.number, offset, len(body), crc32c(body), header.nonce)
    return offset, body.ljust(pad(len(body)), b"\0") + _sealed(fixed, UNIT_NBYTES)


def parse_trailer(block: memoryview, header: FileHeader) -> Trailer | None:
    if not _is_whole(block, _TRAILER.size):
        return None
    magic, version, number, offset, nbytes, crc, nonce = _TRAILER.unpack_from(block)
    if (magic, version, number, nonce) != (_TRAILER_MAGIC, VERSION, header.number, header.nonce):
        return None
    if offset < UNIT_NBYTES or offset + footer_bound_nbytes(nbytes) != header.file_nbytes:
        return None
    return Trailer(offset, nbytes, crc)


def parse_index(body: memoryview, trailer: Trailer, header: FileHeader) -> list[Entry] | None:
    if crc32c(body) != trailer.index_crc:
        return None
    entries = _decode(body, header.number)
    if entries is None or not all(_lies_within(entry, UNIT_NBYTES, trailer.index_offset) for entry in entries):
        return None
    return entries


def _sealed(fixed: bytes, nbytes: int) -> bytes:
    """Return the bytes with their CRC appended, padded to `nbytes`."""
    assert len(fixed) + _CRC.size <= nbytes, "a header must fit the place that was kept for it"
    return (fixed + _CRC.pack(crc32c(fixed))).ljust(nbytes, b"\0")


def _is_whole(block: memoryview, nbytes: int) -> bool:
    return bool(_CRC.unpack_from(block, nbytes)[0] == crc32c(block[:nbytes]))


def _decode(body: memoryview, number: int) -> list[Entry] | None:
    try:
        entries = _decoder.decode(body)
    except msgspec.MsgspecError:
        return None
    return entries if all(entry.file_number == number for entry in entries) else None


def _lies_within(entry: Entry, start: int, end: int) -> bool:
    aligned = entry.offset % UNIT_NBYTES == 0
    return aligned and entry.offset >= start and entry.offset + max(entry.padded_nbytes, 1) <= end
