"""Keys as people write them: what is shown can be typed again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import InvalidInput
from moonpool.store.keys_text import MAX_KEY_NBYTES, key_bytes, keys_bytes, read_key, show_key


@given(st.binary(min_size=1, max_size=50) | st.text(min_size=1, max_size=20).map(str.encode))
def test_shown_and_read(key: bytes) -> None:
    text = show_key(key)
    assert read_key(text) == key
    assert "\n" not in text


def test_texts_and_hexadecimal() -> None:
    assert show_key("Mörder/1".encode()) == "Mörder/1"
    assert show_key(b"\0\xff") == "hex:00ff"
    assert show_key(b"hex:1") == "hex:6865783a31"
    assert read_key("00FF", is_hex=True) == read_key("hex:00ff") == b"\0\xff"
    for bad in ("hex:zz", "hex:", ""):
        with pytest.raises(InvalidInput):
            read_key(bad)
    with pytest.raises(InvalidInput, match="is not hexadecimal"):
        read_key("zz", is_hex=True)
    assert key_bytes("é") == "é".encode()


def test_lists_of_keys() -> None:
    longest = b"x" * MAX_KEY_NBYTES
    assert keys_bytes([]) == []
    assert keys_bytes(iter([b"a", longest])) == [b"a", longest]
    assert keys_bytes(["a", b"b"]) == [b"a", b"b"]
    for bad in ([b"a", b""], [b"a", longest + b"x"], ["a", ""], [b"a", 7], "ab", b"ab"):
        with pytest.raises(InvalidInput):
            keys_bytes(bad)  # type: ignore[arg-type]
