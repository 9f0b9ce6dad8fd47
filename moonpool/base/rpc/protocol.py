"""What calls look like on the wire, without I/O. Both drivers are built from these functions.

A call's body is a msgpack array [name, field, field, ...]; answers are msgpack of the declared type. Fields may
be added at the end with a default, so an old peer still understands.

A call that does not decode is answered with the name of the wrong field and, for a number, its range. msgspec names
places in a message by their position (`$[3][0]`), because calls travel as arrays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any, ClassVar, Generic, TypeVar, Union, get_args

import msgspec
from msgspec import inspect

from moonpool.base.errors import Internal, InvalidInput, MoonpoolError, Overloaded, ProtocolError, from_wire
from moonpool.base.frames import MAX_WAIT_MS, Frame, FrameKind, encode_frame

_PLACE = re.compile(r"(?P<what>.*) - at `(?:key in )?\$(?P<path>[^`]*)`", re.DOTALL)
_STEP = re.compile(r"\[(?P<index>\d+|\.\.\.)\]|\.(?P<name>\w+)")
R = TypeVar("R")
DEFAULT_TIMEOUT_S = 30.0
_ENCODER = msgspec.msgpack.Encoder()
_CALL, _REPLY = FrameKind.CALL, FrameKind.REPLY  # looking an attribute up takes longer than using it


class Call(msgspec.Struct, Generic[R], array_like=True, tag=True):
    """A request whose answer is of type R. Subclass as `class Exist(Call[list[bool]])`.

    A server does not begin a call whose caller no longer waits. One that `outlives_caller` has no deadline: it gives
    something back, or reports what has happened.
    """

    streams: ClassVar[bool] = False
    outlives_caller: ClassVar[bool] = False


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


@lru_cache(maxsize=256)  # few values come again and again
def wait_ms_of(wait_s: float | None) -> int:
    """Return what a call states whose caller waits for `wait_s` from now on: milliseconds, rounded up. None: 0."""
    return 0 if wait_s is None else int(min(wait_s * 1000.0, MAX_WAIT_MS - 1)) + 1


def encode_call(call: Call[Any], call_id: int, wait_ms: int = 0) -> bytes:
    """One frame; `wait_ms` of wait_ms_of(). InvalidInput when a field cannot be sent, such as an integer of more than
    64 bits.
    """
    try:
        body = _ENCODER.encode(call)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise encoding_error(call, error) from error
    return encode_frame(_CALL, call_id, body, 0 if call.outlives_caller else wait_ms)


def encode_value(kind: FrameKind, call_id: int, value: Any) -> bytes:
    return encode_frame(kind, call_id, _ENCODER.encode(value))


def encode_reply(call_id: int, answer: Any) -> bytes:
    """encode_value() of the answer to a call."""
    return encode_frame(_REPLY, call_id, _ENCODER.encode(answer))


def encode_error(call_id: int, error: MoonpoolError) -> bytes:
    retry = error.retry_after_s if isinstance(error, Overloaded) else None
    param = error.param if isinstance(error, InvalidInput) else None
    body = _ENCODER.encode(WireError(error.code, str(error), retry, param))
    return encode_frame(FrameKind.ERROR, call_id, body)


def decode_error(body: bytes) -> MoonpoolError:
    wire = _decode(_decoder(WireError), body)
    return from_wire(wire.code, wire.message, wire.retry_after_s, wire.param)


def decode_reply(call: Call[Any], body: bytes | bytearray | memoryview) -> Any:
    decoder = _reply_decoder(type(call))
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _decode(decoder, body)  # says what is wrong


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
        # msgspec raises UnicodeDecodeError and RecursionError here, not only its own DecodeError.
        raise ProtocolError(f"the peer sent something else than agreed: {error}") from error


class CallDecoder:
    """Turns bodies into one of a fixed set of call types."""

    def __init__(self, calls: Iterable[type[Call[Any]]]) -> None:
        self._calls = {call.__name__: call for call in calls}
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Union[tuple(self._calls.values())])  # noqa: UP007

    def decode(self, body: bytes) -> Call[Any]:
        """Return the call. InvalidInput when a number is outside its range, ProtocolError when it is no known call."""
        try:
            call: Call[Any] = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise decoding_error(error, body, self._calls) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"the peer sent something else than agreed: {error}") from error
        return call


def as_moonpool_error(error: BaseException) -> MoonpoolError:
    """Return a MoonpoolError unchanged, and any other exception as Internal: it is a bug."""
    if isinstance(error, MoonpoolError):
        return error
    return Internal(f"{type(error).__name__}: {error}")


def decoding_error(error: msgspec.ValidationError, body: bytes, calls: Mapping[str, type]) -> MoonpoolError:
    """Return InvalidInput for a number outside its range or bytes of another length, ProtocolError for anything else.

    `calls` maps tags to call types.
    """
    place, call = _PLACE.fullmatch(str(error)), calls.get(_tag(body))
    if place is None or call is None:
        return ProtocolError(f"the peer sent something else than agreed: {error}")
    field, found = _follow(inspect.type_info(call), place["path"])
    allowed = _range(found)
    what = place["what"][:1].lower() + place["what"][1:]
    if " of length " in what:
        return InvalidInput(f"{field} is refused: {what}", param=field)
    if allowed is None or "got" in what:
        return ProtocolError(f"the peer sent something else than agreed: {field} of {call.__name__}: {what}")
    return InvalidInput(f"{field} must be {allowed}", param=field)


def encoding_error(call: msgspec.Struct, error: Exception) -> MoonpoolError:
    """Return an InvalidInput that names the field of `call` that msgspec cannot encode."""
    for field in call.__struct_fields__:
        try:
            msgspec.msgpack.encode(getattr(call, field))
        except (OverflowError, TypeError, ValueError, RecursionError) as reason:
            return InvalidInput(f"{field} of {type(call).__name__} cannot be sent: {reason}", param=field)
    return InvalidInput(f"{type(call).__name__} cannot be sent: {error}")


def _tag(body: bytes) -> str:
    try:
        first = msgspec.msgpack.decode(body)[0]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, LookupError):
        return ""
    return first if isinstance(first, str) else ""


def _follow(found: inspect.Type, path: str) -> tuple[str, inspect.Type]:
    """Return the name of a place in a message, from the names of fields, and its type."""
    name = ""
    for step in _STEP.finditer(path):
        found = _struct_in(found)
        if isinstance(found, inspect.StructType):
            index = int(step["index"]) - (found.tag is not None) if step["index"] else None
            named = [field for at, field in enumerate(found.fields) if at == index or field.name == step["name"]]
            if not named:
                return name or "a field", found
            name, found = f"{name}.{named[0].name}" if name else named[0].name, named[0].type
        else:
            name, found = name + step[0], _item(found, step["index"])
    return name or "a field", _struct_in(found)


def _struct_in(found: inspect.Type) -> inspect.Type:
    """Return the type itself; for an optional type the one that is not None."""
    if isinstance(found, inspect.UnionType):
        return next((each for each in found.types if not isinstance(each, inspect.NoneType)), found)
    return found


def _item(found: inspect.Type, index: str | None) -> inspect.Type:
    if isinstance(found, inspect.TupleType) and index is not None and index.isdecimal():
        return found.item_types[int(index)]
    if isinstance(found, inspect.DictType):
        return found.value_type
    return getattr(found, "item_type", found)


def _range(found: Any) -> str | None:
    if not isinstance(found, (inspect.IntType, inspect.FloatType)) or (found.ge is None and found.le is None):
        return None
    kind = "an integer" if isinstance(found, inspect.IntType) else "a number"
    low, high = (-math.inf if found.ge is None else found.ge), (math.inf if found.le is None else found.le)
    return (
        f"{kind} from {low:g} to {high:g}" if isinstance(found, inspect.FloatType) else f"{kind} from {low} to {high}"
    )
