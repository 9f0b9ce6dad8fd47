"""Keys as programs and people write them. Pure.

A key is bytes. A text stands for its UTF-8; where people read and type keys, one that is not plain text is written
`hex:00ff`, so that whatever is shown can be typed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from moonpool.base.errors import InvalidInput

Key: TypeAlias = str | bytes

MAX_KEY_NBYTES = 0xFFFF  # what an object's header has room for
_HEX = "hex:"


def key_bytes(key: Key) -> bytes:
    """InvalidInput when it is no key: empty, too long, not text and not bytes."""
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
    """key_bytes of each. A single text is refused: its letters are not meant."""
    if isinstance(keys, str | bytes):
        raise InvalidInput("here it takes a list of keys, not one key")
    return [key_bytes(key) for key in keys]


def show_key(key: bytes) -> str:
    """For people; read_key() of it is the key."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return _HEX + key.hex()
    return text if text.isprintable() and not text.startswith(_HEX) else _HEX + key.hex()


def read_key(text: str, is_hex: bool = False) -> bytes:
    """What somebody typed. InvalidInput when it is not the hexadecimal it claims to be."""
    if not is_hex and not text.startswith(_HEX):
        return key_bytes(text)
    try:
        return key_bytes(bytes.fromhex(text.removeprefix(_HEX)))
    except ValueError as error:
        raise InvalidInput(f"{text!r} is not hexadecimal") from error
