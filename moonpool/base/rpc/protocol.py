"""What calls look like on the wire, without I/O. Both drivers are built from these functions.

A call's body is a msgpack array [name, field, field, ...]; answers are msgpack of the declared type. Fields may
be added at the end with a default, so an old peer still understands.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, ClassVar, Generic, TypeVar, Union, get_args

import msgspec

from moonpool.base.errors import Internal, InvalidInput, MoonpoolError, Overloaded, ProtocolError, from_wire
from moonpool.base.frames import Frame, FrameKind, encode_frame
from moonpool.base.rpc.refusals import decoding_error, encoding_error

R = TypeVar("R")

DEFAULT_TIMEOUT_S = 30.0
_ENCODER = msgspec.msgpack.Encoder()


class Call(msgspec.Struct, Generic[R], array_like=True, tag=True):
    """A request whose answer is of type R. Subclass as `class Exist(Call[list[bool]])`."""

    streams: ClassVar[bool] = False


class StreamCall(Call[R], Generic[R]):
    """A request answered by any number of items of type R."""

    streams: ClassVar[bool] = True


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """First message of either side. `incarnation` tells a restarted process from its predecessor; a client that
    `pings` promises to be heard every few seconds."""

    service: str
    name: str = ""
    incarnation: int = 0
    pings: bool = False


class WireError(msgspec.Struct, frozen=True, array_like=True):
    code: str
    message: str
    retry_after_s: float | None = None
    param: str | None = None


@cache
def reply_type(call: type[Call[Any]]) -> Any:
    """The R of a call class."""
    for base in getattr(call, "__orig_bases__", ()):
        if get_args(base):
            return get_args(base)[0]
    raise TypeError(f"{call.__name__} does not say what it returns; derive it from Call[...]")


@cache
def _decoder(reply: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(reply)


@cache
def _reply_decoder(call: type[Call[Any]]) -> msgspec.msgpack.Decoder[Any]:
    return _decoder(reply_type(call))


def encode_call(call: Call[Any], call_id: int) -> bytes:
    """One frame; InvalidInput when a field cannot be sent, such as an integer of more than 64 bits."""
    try:
        body = _ENCODER.encode(call)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise encoding_error(call, error) from error
    return encode_frame(FrameKind.CALL, call_id, body)


def encode_value(kind: FrameKind, call_id: int, value: Any) -> bytes:
    return encode_frame(kind, call_id, _ENCODER.encode(value))


def encode_error(call_id: int, error: MoonpoolError) -> bytes:
    retry = error.retry_after_s if isinstance(error, Overloaded) else None
    param = error.param if isinstance(error, InvalidInput) else None
    body = _ENCODER.encode(WireError(error.code, str(error), retry, param))
    return encode_frame(FrameKind.ERROR, call_id, body)


def decode_error(body: bytes) -> MoonpoolError:
    wire = _decode(_decoder(WireError), body)
    return from_wire(wire.code, wire.message, wire.retry_after_s, wire.param)


def decode_reply(call: Call[Any], body: bytes | bytearray | memoryview) -> Any:
    return _decode(_reply_decoder(type(call)), body)


def decode_hello(frame: Frame) -> Hello:
    if frame.kind is FrameKind.ERROR:
        raise decode_error(frame.body)
    if frame.kind is not FrameKind.HELLO:
        raise ProtocolError("the peer did not introduce itself")
    hello: Hello = _decode(_decoder(Hello), frame.body)
    return hello


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes | bytearray | memoryview) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Text that is none and values nested without end are found by msgspec, and named by Python.
        raise ProtocolError(f"the peer sent something else than agreed: {error}") from error


class CallDecoder:
    """Turns bodies into one of a fixed set of call types."""

    def __init__(self, calls: Iterable[type[Call[Any]]]) -> None:
        self._calls = {call.__name__: call for call in calls}
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Union[tuple(self._calls.values())])  # noqa: UP007

    def decode(self, body: bytes) -> Call[Any]:
        """The call. InvalidInput when a number is outside its range, ProtocolError when it is no such call at all."""
        try:
            call: Call[Any] = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise decoding_error(error, body, self._calls) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"the peer sent something else than agreed: {error}") from error
        return call


def as_moonpool_error(error: BaseException) -> MoonpoolError:
    """Our own errors as they are; anything else is a bug and says so."""
    if isinstance(error, MoonpoolError):
        return error
    return Internal(f"{type(error).__name__}: {error}")
