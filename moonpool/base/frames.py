"""Wire frames, without I/O: bytes in, frames out (docs/formats.md, version 3).

    0  magic "MP"   2  version u8   3  kind u8
    4  checksum u32: CRC-32C of bytes 0 to 4, exclusive or CRC-32C of bytes 8 to the end of the body
    8  body_nbytes u32   12  its complement u32   16  call_id u64   24  wait_ms u32   28  body

`wait_ms` of a CALL is how long its caller waits for the answer from the moment it sends the call; 0: the call has no
deadline. A time span and not a time of day, so the clocks of both sides need not agree. Other frames have 0.

All little-endian. Sizes are checked before anything is allocated for a body; the complement shows a damaged size before
a reader waits for the body. A frame whose checksum does not match is never returned: DamagedFrame is raised and
counted, and the connection has to be closed.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from moonpool.base.checksum import crc32c
from moonpool.base.errors import DamagedFrame, ProtocolError

MAGIC = b"MP"
VERSION = 3
HEADER_NBYTES = 28
MAX_BODY_NBYTES = 64 * 1024 * 1024
MAX_WAIT_MS = 2**32 - 1  # 49 days
_HEADER = struct.Struct("<2sBBIIIQI")
_QUICK = struct.Struct("<4sIIIQI")  # the same, its first three fields as one
_START = struct.Struct("<4sI")
_REST = struct.Struct("<IIQI")
_ALL_BITS = 0xFFFFFFFF
_LITTLE_NBYTES = 8192
_START_NBYTES, _REST_NBYTES = _START.size, _REST.size


class FrameKind(IntEnum):
    HELLO = 0  # first frame of either side
    CALL = 1  # a request
    REPLY = 2  # its one answer
    ERROR = 3  # or its failure; also ends a stream
    ITEM = 4  # one element of a stream
    END = 5  # the stream is complete
    CANCEL = 6  # the caller has given up the call
    PING = 7  # the client asks for a sign of life; call id 0, no body
    PONG = 8  # the server's answer to a ping


_KINDS = {int(kind): kind for kind in FrameKind}
_STARTS = [MAGIC + bytes((VERSION, kind)) for kind in FrameKind]  # by kind; a dict would hash the kind, in Python
_KIND_OF = dict(zip(_STARTS, FrameKind, strict=True))
_SEEDS = [crc32c(start) for start in _STARTS]  # by kind: the checksum of a frame's first 4 bytes


class Frame(NamedTuple):
    kind: FrameKind
    call_id: int
    body: bytes
    wait_ms: int = 0


class FrameHeader(NamedTuple):
    """A frame's header; its body may still be on the wire."""

    kind: FrameKind
    nbytes: int
    call_id: int
    checksum: int
    wait_ms: int

    def with_body(self, body: bytes) -> Frame:
        """Return the whole frame; DamagedFrame when its checksum does not match."""
        rest = _REST.pack(self.nbytes, self.nbytes ^ _ALL_BITS, self.call_id, self.wait_ms)
        # For small bodies a concatenation takes less time than a second call.
        found = crc32c(rest + body) if self.nbytes < _LITTLE_NBYTES else crc32c(body, crc32c(rest))
        if found ^ _SEEDS[self.kind] != self.checksum:
            raise damaged("a message")
        return Frame(self.kind, self.call_id, body, self.wait_ms)


class DamageCount:
    """How many damaged frames this process has received, on all its connections of every protocol."""

    total = 0


def damaged(what: str) -> DamagedFrame:
    """Count a damaged frame and return the error to raise."""
    DamageCount.total += 1
    return DamagedFrame(
        f"the checksum of {what} does not match: it was damaged on its way, and its connection is closed"
    )


def encode_frame(kind: FrameKind, call_id: int, body: bytes = b"", wait_ms: int = 0) -> bytes:
    """Return one frame as bytes. ProtocolError when the body is larger than MAX_BODY_NBYTES."""
    nbytes = len(body)
    if nbytes > MAX_BODY_NBYTES:
        raise ProtocolError(f"a message of {nbytes} bytes is over the limit of {MAX_BODY_NBYTES}")
    rest = _REST.pack(nbytes, nbytes ^ _ALL_BITS, call_id, wait_ms) + body
    return _START.pack(_STARTS[kind], crc32c(rest) ^ _SEEDS[kind]) + rest


def whole_frame(kind: FrameKind, data: bytes | bytearray, nbytes: int) -> tuple[int, bytes, int] | None:
    """Return call id, body and `wait_ms` when the first `nbytes` of `data` are exactly one undamaged frame of that
    kind; None otherwise (decode_header() finds the reason). This is the common case: one call or one answer, read at
    once.
    """
    if nbytes < HEADER_NBYTES:
        return None
    start, checksum, body_nbytes, _, call_id, wait_ms = _QUICK.unpack_from(data)
    if start != _STARTS[kind] or nbytes != HEADER_NBYTES + body_nbytes:
        return None
    rest = data[_START_NBYTES:nbytes] if type(data) is bytes else bytes(memoryview(data)[_START_NBYTES:nbytes])
    return (call_id, rest[_REST_NBYTES:], wait_ms) if crc32c(rest) ^ _SEEDS[kind] == checksum else None


def decode_header(header: bytes | bytearray | memoryview, at: int = 0, *, is_first: bool = True) -> FrameHeader:
    """Return the fields of the header at `at`. ProtocolError when it is not one of ours, DamagedFrame when its size is
    damaged.

    `is_first` False: good frames came before on this connection, so a header that is not one of ours is a damaged one.
    """
    magic, version, kind, checksum, nbytes, complement, call_id, wait_ms = _HEADER.unpack_from(header, at)
    try:
        _check_start(magic, version)
        if kind not in _KINDS:
            raise ProtocolError(f"unknown frame kind {kind}")
    except ProtocolError as error:
        if is_first:
            raise
        raise damaged("a message's header") from error
    if nbytes ^ complement != _ALL_BITS:
        raise damaged("a message's size")
    if nbytes > MAX_BODY_NBYTES:
        raise ProtocolError(f"the peer announced {nbytes} bytes, the limit is {MAX_BODY_NBYTES}")
    return FrameHeader(_KINDS[kind], nbytes, call_id, checksum, wait_ms)


def _check_start(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise ProtocolError("the peer does not speak this protocol")
    if version != VERSION:
        raise ProtocolError(
            f"the peer speaks version {version} of the RPC protocol, this side version {VERSION}; "
            "run the same version of Moonpool on both"
        )


class FrameDecoder:
    """Collects bytes until frames are complete. After a ProtocolError or DamagedFrame it must not be used again.

    A header that announces more than `max_body_nbytes` is refused; the owner may change that between two frames.
    """

    def __init__(self, max_body_nbytes: int = MAX_BODY_NBYTES) -> None:
        self.max_body_nbytes = max_body_nbytes
        self.held: bytes | bytearray = b""  # the last received part, or several parts joined; empty: no frame has begun
        self._at = 0  # bytes before it were returned
        self._is_first = True  # no frame has come yet

    @property
    def nbytes(self) -> int:
        """Bytes that are held here and not yet returned in a frame."""
        return len(self.held) - self._at

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Return all frames completed by `data`, in order."""
        self.push(data)
        frames: list[Frame] = []
        while (frame := self.next()) is not None:
            frames.append(frame)
        return frames

    def push(self, data: bytes | bytearray | memoryview) -> None:
        """Add received bytes; next() returns the frames in them."""
        if len(self.held) == self._at:
            self.held, self._at = bytes(data), 0
            return
        if isinstance(self.held, bytes):
            self.held = bytearray(memoryview(self.held)[self._at :])
        else:
            del self.held[: self._at]
        self._at = 0
        self.held += data

    def next(self) -> Frame | None:
        """Return the next complete frame, or None."""
        buffer, at = self.held, self._at
        begin = at + HEADER_NBYTES
        if len(buffer) >= begin:
            frame = self._little_frame(buffer, at)
            if frame is not None:
                return frame
            header = decode_header(buffer, at, is_first=self._is_first)
            if header.nbytes > self.max_body_nbytes:
                raise ProtocolError(f"the peer announced {header.nbytes} bytes, the limit is {self.max_body_nbytes}")
            end = begin + header.nbytes
            if len(buffer) >= end:
                self._at, self._is_first = end, False
                body = buffer[begin:end] if isinstance(buffer, bytes) else bytes(memoryview(buffer)[begin:end])
                return header.with_body(body)
        elif self._is_first and len(buffer) > len(MAGIC):  # another version's header may be shorter
            _check_start(bytes(buffer[: len(MAGIC)]), buffer[len(MAGIC)])
        if self._at:  # otherwise a large frame's first parts would be copied with each of the others
            self.held, self._at = buffer[self._at :], 0
        return None

    def _little_frame(self, buffer: bytes | bytearray, at: int) -> Frame | None:
        """Return the frame at `at` when it is little, complete and undamaged, as nearly all are, in half the time that
        the header alone takes; None otherwise."""
        start, checksum, nbytes, _, call_id, wait_ms = _QUICK.unpack_from(buffer, at)
        kind, end = _KIND_OF.get(start), at + HEADER_NBYTES + nbytes
        if kind is None or nbytes > _LITTLE_NBYTES or nbytes > self.max_body_nbytes or end > len(buffer):
            return None
        rest = bytes(buffer[at + _START_NBYTES : end])
        if crc32c(rest) ^ _SEEDS[kind] != checksum:
            return None
        self._at, self._is_first = end, False
        return Frame(kind, call_id, rest[_REST_NBYTES:], wait_ms)
