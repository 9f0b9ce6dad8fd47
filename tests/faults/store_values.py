"""Values that say themselves whose they are, so that any process can tell right bytes from wrong ones."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

from severe import WrongBytes, check_bytes

_HEAD = struct.Struct("<QQQ")  # number, version, size


def value_of(number: int, version: int, nbytes: int) -> bytes:
    """At least 24 bytes."""
    body = random.Random(f"{number}/{version}").randbytes(max(0, nbytes - _HEAD.size))
    return _HEAD.pack(number, version, len(body)) + body


def version_in(data: bytes | bytearray | memoryview, number: int) -> int:
    """Which version of value `number` this is; WrongBytes when it is none."""
    found, version, body_nbytes = _HEAD.unpack_from(data)
    if found != number:
        raise WrongBytes(f"bytes of value {found} instead of {number}")
    if len(data) != _HEAD.size + body_nbytes:
        raise WrongBytes(f"{len(data)} bytes of value {number}")
    check_bytes(data, value_of(number, version, len(data)), f"version {version} of value {number}")
    return int(version)


def cut(data: bytes, num_parts: int) -> Sequence[memoryview]:
    """The data as so many pieces."""
    step = -(-len(data) // num_parts)
    return [memoryview(data)[at : at + step] for at in range(0, len(data), step)]
