"""Wire frames, without I/O: bytes in, frames out (docs/formats.md, version 1).

    0  magic "MP"   2  version u8   3  kind u8   4  body_nbytes u32   8  call_id u64   16  body

All little-endian. Sizes are checked before anything is allocated for a body.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from moonpool.base.errors import ProtocolError

MAGIC = b"MP"
VERSION = 1
HEADER_NBYTES = 16
MAX_BODY_NBYTES = 64 * 1024 * 1024
_HEADER = struct.Struct("<2sBBIQ")
_QUICK = struct.Struct("<4sIQ")  # the same, its first three fields as one


class FrameKind(IntEnum):
    HELLO = 0  # first frame of either side
    CALL = 1  # a request
    REPLY = 2  # its one answer
    ERROR = 3  # or its failure; also ends a stream
    ITEM = 4  # one element of a stream
    END = 5  # the stream is complete
    CANCEL = 6  # the caller no longer wants the answer
    PING = 7  # the client asks for a sign of life; call id 0, no body
    PONG = 8  # the server gives it


_KINDS = {int(kind): kind for kind in FrameKind}
_STARTS = {kind: MAGIC + bytes((VERSION, kind)) for kind in FrameKind}


class Frame(NamedTuple):
    kind: FrameKind
    call_id: int
    body: bytes


def encode_frame(kind: FrameKind, call_id: int, body: bytes = b"") -> bytes:
    """One frame as bytes; ProtocolError when the body is larger than any peer would take."""
    if len(body) > MAX_BODY_NBYTES:
        raise ProtocolError(f"a message of {len(body)} bytes is over the limit of {MAX_BODY_NBYTES}")
    return _QUICK.pack(_STARTS[kind], len(body), call_id) + body


def whole_frame(kind: FrameKind, data: bytes | bytearray, nbytes: int) -> int | None:
    """The call id, when the first `nbytes` of `data` are one frame of that kind and nothing else; None otherwise, and
    decode_header says what they are. Most of what is received is that: one call, or its answer, read at once.
    """
    if nbytes < HEADER_NBYTES:
        return None
    start, body_nbytes, call_id = _QUICK.unpack_from(data)
    return call_id if start == _STARTS[kind] and nbytes == HEADER_NBYTES + body_nbytes <= MAX_BODY_NBYTES else None


def decode_header(header: bytes | bytearray | memoryview, at: int = 0) -> tuple[FrameKind, int, int]:
    """(kind, body_nbytes, call_id) of the 16-byte header at `at`; ProtocolError when it is not one of ours."""
    magic, version, kind, nbytes, call_id = _HEADER.unpack_from(header, at)
    if magic != MAGIC:
        raise ProtocolError("the peer does not speak this protocol")
    if version != VERSION:
        raise ProtocolError(f"the peer speaks version {version}, this side version {VERSION}")
    if kind not in _KINDS:
        raise ProtocolError(f"unknown frame kind {kind}")
    if nbytes > MAX_BODY_NBYTES:
        raise ProtocolError(f"the peer announced {nbytes} bytes, the limit is {MAX_BODY_NBYTES}")
    return _KINDS[kind], nbytes, call_id


class FrameDecoder:
    """Collects bytes until frames are whole. After a ProtocolError it must not be used again.

    A header that announces more than `max_body_nbytes` is refused; the owner may change that between two frames.
    """

    def __init__(self, max_body_nbytes: int = MAX_BODY_NBYTES) -> None:
        self.max_body_nbytes = max_body_nbytes
        self._buffer: bytes | bytearray = b""  # the last part as it came, or several parts together
        self._at = 0  # what lies before has been returned

    @property
    def is_empty(self) -> bool:
        """No frame has begun."""
        return not self._buffer

    @property
    def nbytes(self) -> int:
        """Bytes that are held here and not yet returned in a frame."""
        return len(self._buffer) - self._at

    def feed(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Return all frames completed by `data`, in order."""
        self.push(data)
        frames: list[Frame] = []
        while (frame := self.next()) is not None:
            frames.append(frame)
        return frames

    def push(self, data: bytes | bytearray | memoryview) -> None:
        """Take bytes in; next() returns the frames in them."""
        if len(self._buffer) == self._at:
            self._buffer, self._at = bytes(data), 0
            return
        if isinstance(self._buffer, bytes):
            self._buffer = bytearray(memoryview(self._buffer)[self._at :])
        else:
            del self._buffer[: self._at]
        self._at = 0
        self._buffer += data

    def next(self) -> Frame | None:
        """Return the next whole frame, None when there is none yet."""
        buffer, begin = self._buffer, self._at + HEADER_NBYTES
        if len(buffer) >= begin:
            kind, nbytes, call_id = decode_header(buffer, self._at)
            if nbytes > self.max_body_nbytes:
                raise ProtocolError(f"the peer announced {nbytes} bytes, the limit is {self.max_body_nbytes}")
            end = begin + nbytes
            if len(buffer) >= end:
                self._at = end
                body = buffer[begin:end] if isinstance(buffer, bytes) else bytes(memoryview(buffer)[begin:end])
                return Frame(kind, call_id, body)
        self._buffer, self._at = buffer[self._at :], 0
        return None
