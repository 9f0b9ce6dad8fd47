"""Keys as programs and people write them. Pure.

A key is bytes; text stands for its UTF-8 bytes. Where people read and type keys, a key that is not printable text is
written as `hex:00ff`, so that every key that is shown can be typed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, cast

from moonpool.base.errors import InvalidInput

Key: TypeAlias = str | bytes

MAX_KEY_NBYTES = 0xFFFF  # the object header has a 16-bit size for it
_HEX = "hex:"
_KEY_TYPES = (str, bytes)  # a tuple: `str | bytes` would be evaluated in each call


def key_bytes(key: Key) -> bytes:
    """Return the key's bytes. InvalidInput when it is empty, too long, or neither text nor bytes."""
    if isinstance(key, str):
        try:
            key = key.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput(f"the key {key!r} is no text: {error.reason}") from error
    if not isinstance(key, bytes):
        raise InvalidInput(f"a key is str or bytes, not {type(key).__name__}")
    if not 0 < len(key) <= MAX_KEY_NBYTES:
        raise InvalidInput(f"a key has 1 to {MAX_KEY_NBYTES} bytes, not {len(key)}")
    return key


def keys_bytes(keys: Iterable[Key]) -> list[bytes]:
    """key_bytes() of each. A single key instead of a list is refused, so that its letters are not taken as keys."""
    if isinstance(keys, _KEY_TYPES):
        raise InvalidInput("here it takes a list of keys, not one key")
    found = list(keys)
    if len(found) == 1:
        return [key_bytes(found[0])]
    if set(map(type, found)) == {bytes}:  # the fast way for many keys: three loops in C instead of 1000 calls
        sizes = set(map(len, found))
        if min(sizes) > 0 and max(sizes) <= MAX_KEY_NBYTES:
            return cast("list[bytes]", found)
    return [key_bytes(key) for key in found]


def show_key(key: bytes) -> str:
    """Return the key as text for people; read_key() is the inverse."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return _HEX + key.hex()
    return text if text.isprintable() and not text.startswith(_HEX) else _HEX + key.hex()


def read_key(text: str, is_hex: bool = False) -> bytes:
    """Return the key that a person typed. InvalidInput when hexadecimal was announced and is not given."""
    if not is_hex and not text.startswith(_HEX):
        return key_bytes(text)
    try:
        return key_bytes(bytes.fromhex(text.removeprefix(_HEX)))
    except ValueError as error:
        raise InvalidInput(f"{text!r} is not hexadecimal") from error
