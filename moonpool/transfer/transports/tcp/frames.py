"""The tcp transport's frames, without I/O (docs/formats.md, version 1). All numbers are little-endian.

Request, 48 bytes, then the name, then for a WRITE the data:

     0  magic "MPTX"       4  version u8 = 1      5  op u8: 1 READ, 2 WRITE,    6  name_nbytes u16: 1..255
                                                     3 ASK                          (0 for an ASK)
     8  request_id u64    16  incarnation u64    24  offset u64                32  nbytes u64
    40  generation u64 (0 for a READ)            48  name, UTF-8               48 + name_nbytes  data (WRITE, ASK)

An ASK carries one call to the owner's desk (transfer/desk.py), msgpack, at most 64 KiB; its other fields are 0.

Response, 24 bytes, then for a READ or ASK that succeeded the data, or for a failure its text:

     0  magic "MPTX"       4  version u8 = 1      5  status u8: 0 OK, 1 ERROR   6  reserved u16 = 0
     8  request_id u64 of the request answered (0: the connection itself is refused)
    16  nbytes u64: data of a READ, 0 for a WRITE, the answer to an ASK (msgpack, at most 1 MiB), the text of an ERROR
        (at most 1,024)
    24  data, or text: an error code of base/errors.py, one space, a sentence; UTF-8

Requests of one connection are answered in order; several may be under way. A request once begun is sent whole: the
owner may keep earlier answers until it has it. A WRITE is answered when its bytes are in the owner's memory. A
refused WRITE's data is read and thrown away, so the connection stays in step. One request carries at most 1 GiB.
Whoever receives a frame that breaks these rules closes the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

from moonpool.base.errors import InvalidInput, MoonpoolError, ProtocolError, from_wire
from moonpool.transfer.segment import MAX_NAME_NBYTES

MAGIC = b"MPTX"
VERSION = 1
MAX_DATA_NBYTES = 1 << 30
MAX_ASK_NBYTES = 64 * 1024
MAX_ANSWER_NBYTES = 1024 * 1024
MAX_ERROR_NBYTES = 1024
_REQUEST = struct.Struct("<4sBBHQQQQQ")
_RESPONSE = struct.Struct("<4sBBHQQ")
REQUEST_NBYTES = _REQUEST.size
RESPONSE_NBYTES = _RESPONSE.size
_U64 = 1 << 64


class Op(IntEnum):
    READ = 1
    WRITE = 2
    ASK = 3


class Status(IntEnum):
    OK = 0
    ERROR = 1


# Calling an enum for its member takes longer than the rest of a frame.
_OPS = {member.value: member for member in Op}
_STATUSES = {member.value: member for member in Status}


class Request(NamedTuple):
    op: Op
    request_id: int
    name: str
    incarnation: int
    offset: int
    nbytes: int
    generation: int = 0


class RequestHead(NamedTuple):
    """A request whose name is still on the wire."""

    op: Op
    name_nbytes: int
    request_id: int
    incarnation: int
    offset: int
    nbytes: int
    generation: int

    def with_name(self, name: bytes | bytearray | memoryview) -> Request:
        """ProtocolError when the name is not text."""
        try:
            text = str(name, "utf-8")
        except UnicodeDecodeError as error:
            raise ProtocolError("the segment's name is not UTF-8") from error
        return Request(self.op, self.request_id, text, self.incarnation, self.offset, self.nbytes, self.generation)


class Response(NamedTuple):
    status: Status
    request_id: int
    nbytes: int


def pack_request(request: Request) -> bytes:
    """Header and name; a WRITE's data follows. InvalidInput when a value does not fit its field."""
    order = (request.request_id, request.offset, request.nbytes, request.generation)
    return pack_requests(request.op, request.name, request.incarnation, [order])[0]


def pack_requests(op: Op, name: str, incarnation: int, orders: Iterable[tuple[int, int, int, int]]) -> list[bytes]:
    """As pack_request(), for each (request_id, offset, nbytes, generation)."""
    text = name.encode()
    if not 0 < len(text) <= MAX_NAME_NBYTES:
        raise InvalidInput(f"a segment's name has 1 to {MAX_NAME_NBYTES} bytes, not {len(text)}")
    heads: list[bytes] = []
    try:
        for request_id, offset, nbytes, generation in orders:
            if nbytes > MAX_DATA_NBYTES:
                raise InvalidInput(f"one request carries at most {MAX_DATA_NBYTES} bytes, not {nbytes}")
            fields = (MAGIC, VERSION, op, len(text), request_id, incarnation, offset, nbytes, generation)
            heads.append(_REQUEST.pack(*fields) + text)
    except struct.error as error:
        raise InvalidInput(f"the request does not fit the frame: {error}") from error
    return heads


def pack_ask(request_id: int, body: bytes) -> bytes:
    """A whole request. InvalidInput when the call is too large."""
    if len(body) > MAX_ASK_NBYTES:
        raise InvalidInput(f"a call has at most {MAX_ASK_NBYTES} bytes, not {len(body)}")
    return _REQUEST.pack(MAGIC, VERSION, Op.ASK, 0, request_id, 0, 0, len(body), 0) + body


def unpack_request(frame: bytes | bytearray | memoryview) -> RequestHead:
    """The first 48 bytes of a request; ProtocolError when they break a rule. Allocates nothing."""
    magic, version, op, name_nbytes, request_id, incarnation, offset, nbytes, generation = _unpack(_REQUEST, frame)
    _check_start(magic, version)
    known_op = _OPS.get(op)
    if known_op is None:
        raise ProtocolError(f"unknown operation {op}")
    if not 0 < name_nbytes <= MAX_NAME_NBYTES and (name_nbytes, known_op) != (0, Op.ASK):
        raise ProtocolError(f"a name of {name_nbytes} bytes is not allowed")
    if nbytes > (MAX_ASK_NBYTES if known_op is Op.ASK else MAX_DATA_NBYTES) or offset + nbytes >= _U64:
        raise ProtocolError(f"a request for {nbytes} bytes at {offset} is over the limit")
    return RequestHead(known_op, name_nbytes, request_id, incarnation, offset, nbytes, generation)


def pack_response(request_id: int, nbytes: int) -> bytes:
    """A success; `nbytes` of data follow."""
    return _RESPONSE.pack(MAGIC, VERSION, Status.OK, 0, request_id, nbytes)


def pack_refusal(request_id: int, error: MoonpoolError) -> bytes:
    """A failure, text included (cut to fit)."""
    text = f"{error.code} {error}".encode()[:MAX_ERROR_NBYTES]
    return _RESPONSE.pack(MAGIC, VERSION, Status.ERROR, 0, request_id, len(text)) + text


def unpack_response(frame: bytes | bytearray | memoryview) -> Response:
    """The first 24 bytes of a response; ProtocolError when they break a rule. Allocates nothing."""
    magic, version, status, reserved, request_id, nbytes = _unpack(_RESPONSE, frame)
    _check_start(magic, version)
    known_status = _STATUSES.get(status)
    if known_status is None or reserved != 0:
        raise ProtocolError(f"unknown status {status}")
    if nbytes > (MAX_DATA_NBYTES if known_status is Status.OK else MAX_ERROR_NBYTES):
        raise ProtocolError(f"an answer of {nbytes} bytes is over the limit")
    return Response(known_status, request_id, nbytes)


def unpack_error(text: bytes | bytearray | memoryview) -> MoonpoolError:
    """The error a refusal's text stands for; never raises."""
    code, _, message = str(text, "utf-8", "replace").partition(" ")
    return from_wire(code, message)


def _unpack(layout: struct.Struct, frame: bytes | bytearray | memoryview) -> tuple[Any, ...]:
    if len(frame) < layout.size:
        raise ProtocolError(f"a frame of {len(frame)} bytes is cut short")
    return layout.unpack_from(frame)


def _check_start(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise ProtocolError("the peer does not speak the transfer protocol")
    if version != VERSION:
        raise ProtocolError(f"the peer speaks version {version} of the transfer protocol, this side {VERSION}")
