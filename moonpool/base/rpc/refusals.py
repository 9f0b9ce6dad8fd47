"""What is wrong with a call that does not decode: the field by its name and, for a number, its range. No I/O.

msgspec names places in a message by their position (`$[3][0]`), because calls travel as arrays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import inspect

from moonpool.base.errors import InvalidInput, MoonpoolError, ProtocolError

_PLACE = re.compile(r"(?P<what>.*) - at `(?:key in )?\$(?P<path>[^`]*)`", re.DOTALL)
_STEP = re.compile(r"\[(?P<index>\d+|\.\.\.)\]|\.(?P<name>\w+)")


def decoding_error(error: msgspec.ValidationError, body: bytes, calls: Mapping[str, type]) -> MoonpoolError:
    """InvalidInput for a number outside its range or bytes of another length, ProtocolError for anything else.

    `calls` has the call types by their tags.
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
    """InvalidInput that names the field of `call` that msgspec cannot encode."""
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
    """The place's name, from the names of fields, and its type."""
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
    """The type itself; of an optional one what it is if it is not None."""
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
