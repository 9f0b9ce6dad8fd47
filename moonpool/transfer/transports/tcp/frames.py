"""The tcp transport's frames, without I/O (docs/formats.md, version 2). All numbers are little-endian.

Request, 56 bytes, then the name, then for a WRITE the data, for an ASK the call:

     0  magic "MPTX"       4  version u8 = 2      5  op u8: 1 READ, 2 WRITE,    6  name_nbytes u16: 1..255
                                                     3 ASK                          (0 for an ASK)
     8  request_id u64    16  incarnation u64    24  offset u64                32  nbytes u64
    40  generation u64: that a WRITE stamps; that a READ expects, 0 for none
    48  CRC-32C u32 of the name, or of an ASK's call                           52  CRC-32C u32 of bytes 0 to 52

An ASK carries one control call (transfer/control.py), msgpack, at most 64 KiB; its other fields are 0.

Response, 32 bytes, then for a READ or ASK that succeeded the data, or for a failure its text:

     0  magic "MPTX"       4  version u8 = 2      5  status u8: 0 OK, 1 ERROR   6  reserved u16 = 0
     8  request_id u64 of the request answered (0: the connection itself is refused)
    16  nbytes u64: data of a READ, 0 for a WRITE, the answer to an ASK (msgpack, at most 1 MiB), the text of an ERROR
        (at most 1,024)
    24  CRC-32C u32 of the answer to an ASK or the text of an ERROR, else 0    28  CRC-32C u32 of bytes 0 to 28
    32  data, or text: an error code of base/errors.py, one space, a sentence; UTF-8

The data of a READ that expects a generation is followed by its verdict, 16 bytes:

     0  verdict u32: 0 the space carried that generation from before the first byte was taken until after the last,
        1 it does not any more: the data must not be used
     4  request_id u64    12  CRC-32C u32 of bytes 0 to 12

Requests of one connection are answered in order; several may be under way. A request once begun is sent whole: the
owner may keep earlier answers until it has it. A WRITE is answered when its bytes are in the owner's memory. A
refused WRITE's data is read and thrown away, so the connection stays in step. One request carries at most 1 GiB.
Nothing is read or written for a request before its checksums have passed. The receiver of a frame that breaks these
rules, or is damaged, closes the connection. Data of READs and WRITEs has no checksum here: what is stored has its own.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from moonpool.base.checksum import crc32c
from moonpool.base.errors import InvalidInput, MoonpoolError, ProtocolError, from_wire
from moonpool.base.frames import damaged
from moonpool.transfer.memory.segment import MAX_NAME_NBYTES

MAGIC = b"MPTX"
VERSION = 2
MAX_DATA_NBYTES = 1 << 30
MAX_ASK_NBYTES = 64 * 1024
MAX_ANSWER_NBYTES = 1024 * 1024
MAX_ERROR_NBYTES = 1024
_START = struct.Struct("<4sB")
_REQUEST_START = struct.Struct("<4sBBH")
_REQUEST = struct.Struct("<4sBBHQQQQQI")
_RESPONSE = struct.Struct("<4sBBHQQI")
_VERDICT = struct.Struct("<IQ")
_CRC = struct.Struct("<I")
START_NBYTES = _START.size
REQUEST_NBYTES = _REQUEST.size + _CRC.size
RESPONSE_NBYTES = _RESPONSE.size + _CRC.size
VERDICT_NBYTES = _VERDICT.size + _CRC.size
_STARTED = _START.pack(MAGIC, VERSION)
_U64 = 1 << 64


class FrameOp(IntEnum):
    READ = 1
    WRITE = 2
    ASK = 3


class FrameStatus(IntEnum):
    OK = 0
    ERROR = 1


class ReadVerdict(IntEnum):
    SAME = 0
    STALE = 1


# Calling an enum for its member takes longer than the rest of a frame.
_OPS = {member.value: member for member in FrameOp}
_NAMED_OPS = {FrameOp.READ.value, FrameOp.WRITE.value}
_STATUSES = {member.value: member for member in FrameStatus}
_VERDICTS = {member.value: member for member in ReadVerdict}


class Request(NamedTuple):
    op: FrameOp
    request_id: int
    name: str
    incarnation: int
    offset: int
    nbytes: int
    generation: int = 0
    checksum: int = 0  # of an ASK's call


class RequestHead(NamedTuple):
    """A request whose name is still on the wire."""

    op: FrameOp
    name_nbytes: int
    request_id: int
    incarnation: int
    offset: int
    nbytes: int
    generation: int
    checksum: int

    def with_name(self, name: bytes | bytearray | memoryview) -> Request:
        """DamagedFrame when it is not the name that was sent, ProtocolError when that is not text."""
        raw = bytes(name)
        if raw and crc32c(raw) != self.checksum:
            raise damaged("the name in a request")
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError("the segment's name is not UTF-8") from error
        return Request(
            self.op, self.request_id, text, self.incarnation, self.offset, self.nbytes, self.generation, self.checksum
        )


class Response(NamedTuple):
    status: FrameStatus
    request_id: int
    nbytes: int
    checksum: int = 0  # of an answer or a text


def pack_request(request: Request) -> bytes:
    """Header and name; a WRITE's data follows. InvalidInput when a value does not fit its field."""
    packer = RequestPacker(request.name, request.incarnation)
    return packer.pack(request.op, request.request_id, request.offset, request.nbytes, request.generation)


class RequestPacker:
    """Packs requests about one segment one at a time, with what does not change between them prepared."""

    def __init__(self, name: str, incarnation: int) -> None:
        """InvalidInput when the name cannot be sent."""
        self._text = name.encode()
        if not 0 < len(self._text) <= MAX_NAME_NBYTES:
            raise InvalidInput(f"a segment's name has 1 to {MAX_NAME_NBYTES} bytes, not {len(self._text)}")
        self._name_crc = crc32c(self._text)
        self._incarnation = incarnation

    def pack(self, op: FrameOp, request_id: int, offset: int, nbytes: int, generation: int) -> bytes:
        """As pack_request()."""
        text = self._text
        if nbytes > MAX_DATA_NBYTES:
            raise InvalidInput(f"one request carries at most {MAX_DATA_NBYTES} bytes, not {nbytes}")
        try:
            head = _REQUEST.pack(
                MAGIC, VERSION, op, len(text), request_id, self._incarnation, offset, nbytes, generation, self._name_crc
            )
        except struct.error as error:
            raise InvalidInput(f"the request does not fit the frame: {error}") from error
        return head + _CRC.pack(crc32c(head)) + text


def pack_start(op: FrameOp, name_nbytes: int) -> bytes:
    """The first 8 bytes of a request."""
    return _REQUEST_START.pack(MAGIC, VERSION, op, name_nbytes)


def pack_ask(request_id: int, body: bytes) -> bytes:
    """A whole request. InvalidInput when the call is too large."""
    if len(body) > MAX_ASK_NBYTES:
        raise InvalidInput(f"a call has at most {MAX_ASK_NBYTES} bytes, not {len(body)}")
    return _sealed(_REQUEST.pack(MAGIC, VERSION, FrameOp.ASK, 0, request_id, 0, 0, len(body), 0, crc32c(body))) + body


def check_start(frame: bytes | bytearray | memoryview) -> None:
    """ProtocolError when the first 5 bytes are not of this protocol, in this version."""
    magic, version = _START.unpack_from(frame)
    if magic != MAGIC:
        raise ProtocolError("the peer does not speak the transfer protocol")
    if version != VERSION:
        raise ProtocolError(
            f"the peer speaks version {version} of the transfer protocol, this side version {VERSION}; "
            "run the same version of Moonpool on both"
        )


def unpack_request(frame: bytes | bytearray | memoryview) -> RequestHead:
    """The first 56 bytes of a request; ProtocolError when they break a rule, DamagedFrame when they are damaged."""
    fields = _opened(_REQUEST, frame, "a request")
    op, name_nbytes, request_id, incarnation, offset, nbytes, generation, checksum = fields[2:]
    known_op = _OPS.get(op)
    if known_op is None:
        raise ProtocolError(f"unknown operation {op}")
    if not 0 < name_nbytes <= MAX_NAME_NBYTES and (name_nbytes, known_op) != (0, FrameOp.ASK):
        raise ProtocolError(f"a name of {name_nbytes} bytes is not allowed")
    if nbytes > (MAX_ASK_NBYTES if known_op is FrameOp.ASK else MAX_DATA_NBYTES) or offset + nbytes >= _U64:
        raise ProtocolError(f"a request for {nbytes} bytes at {offset} is over the limit")
    return RequestHead(known_op, name_nbytes, request_id, incarnation, offset, nbytes, generation, checksum)


class RequestReader:
    """Takes the requests of one connection apart. They mostly are about one segment: its name is checked once."""

    def __init__(self) -> None:
        self._name = b""  # of the last request
        self._name_crc = 0
        self._text = ""

    def read(self, frame: memoryview) -> tuple[Request, int] | None:
        """Return the request at the start of `frame`, and the size of its head and name. None when it is not whole, or
        anything about it is unusual: unpack_request() then tells what.
        """
        end = REQUEST_NBYTES + len(self._name)
        raw = bytes(frame[:end])
        if not self._name or len(raw) < end or raw[REQUEST_NBYTES:] != self._name or not raw.startswith(_STARTED):
            return None
        _, _, op, name_nbytes, request_id, incarnation, offset, nbytes, generation, checksum = _REQUEST.unpack_from(raw)
        if (
            name_nbytes != len(self._name)
            or checksum != self._name_crc
            or crc32c(raw[: _REQUEST.size]) != _CRC.unpack_from(raw, _REQUEST.size)[0]
            or op not in _NAMED_OPS
            or nbytes > MAX_DATA_NBYTES
            or offset + nbytes >= _U64
        ):
            return None
        return Request(_OPS[op], request_id, self._text, incarnation, offset, nbytes, generation, checksum), end

    def remember(self, request: Request) -> None:
        """Remember the name of a request that unpack_request() has parsed."""
        if request.op in _NAMED_OPS:
            self._text, self._name, self._name_crc = request.name, request.name.encode(), request.checksum


@lru_cache(maxsize=4096)  # the requests of a connection are numbered from 1 on, again and again
def pack_response(request_id: int, nbytes: int) -> bytes:
    """A success of a READ or WRITE; `nbytes` of data follow."""
    head = _RESPONSE.pack(MAGIC, VERSION, 0, 0, request_id, nbytes, 0)
    return head + _CRC.pack(crc32c(head))


def pack_answer(request_id: int, body: bytes) -> bytes:
    """The answer to an ASK, whole."""
    return _sealed(_RESPONSE.pack(MAGIC, VERSION, 0, 0, request_id, len(body), crc32c(body))) + body


def pack_refusal(request_id: int, error: MoonpoolError) -> bytes:
    """A failure, text included (cut to fit)."""
    text = f"{error.code} {error}".encode()[:MAX_ERROR_NBYTES]
    return _sealed(_RESPONSE.pack(MAGIC, VERSION, FrameStatus.ERROR, 0, request_id, len(text), crc32c(text))) + text


def unpack_response(frame: bytes | bytearray | memoryview) -> Response:
    """The first 32 bytes of a response; ProtocolError when they break a rule, DamagedFrame when they are damaged."""
    status, reserved, request_id, nbytes, checksum = _opened(_RESPONSE, frame, "an answer")[2:]
    known_status = _STATUSES.get(status)
    if known_status is None or reserved != 0:
        raise ProtocolError(f"unknown status {status}")
    if nbytes > (MAX_DATA_NBYTES if known_status is FrameStatus.OK else MAX_ERROR_NBYTES):
        raise ProtocolError(f"an answer of {nbytes} bytes is over the limit")
    return Response(known_status, request_id, nbytes, checksum)


@lru_cache(maxsize=4096)
def pack_verdict(request_id: int, verdict: ReadVerdict) -> bytes:
    """What follows the data of a READ that expects a generation."""
    return _sealed(_VERDICT.pack(verdict, request_id))


def unpack_verdict(frame: bytes | bytearray | memoryview, request_id: int) -> ReadVerdict:
    """The verdict on that request's data; ProtocolError when it is none, DamagedFrame when it is damaged."""
    raw = bytes(frame)
    verdict, found_id = _VERDICT.unpack_from(raw)
    if crc32c(raw[: _VERDICT.size]) != _CRC.unpack_from(raw, _VERDICT.size)[0]:
        raise damaged("the verdict on data")
    known = _VERDICTS.get(verdict)
    if known is None or found_id != request_id:
        raise ProtocolError(f"verdict {verdict} on request {found_id} was not expected")
    return known


def check_body(body: bytes, checksum: int) -> bytes:
    """Return the call or answer, or text; DamagedFrame when it is not what was sent."""
    if crc32c(body) != checksum:
        raise damaged("a call or its answer")
    return body


def unpack_error(text: bytes | bytearray | memoryview) -> MoonpoolError:
    """The error a refusal's text stands for; never raises."""
    code, _, message = str(text, "utf-8", "replace").partition(" ")
    return from_wire(code, message)


def _sealed(head: bytes) -> bytes:
    """The bytes and their checksum."""
    return head + _CRC.pack(crc32c(head))


def _opened(layout: struct.Struct, frame: bytes | bytearray | memoryview, what: str) -> tuple[Any, ...]:
    """The fields of a sealed head."""
    nbytes = layout.size
    if len(frame) < nbytes + _CRC.size:
        raise ProtocolError(f"a frame of {len(frame)} bytes is cut short")
    head = bytes(frame[:nbytes])
    if not head.startswith(_STARTED):
        check_start(head)
    if crc32c(head) != _CRC.unpack_from(frame, nbytes)[0]:
        raise damaged(what)
    return layout.unpack(head)
