"""Keys as people write them: what is shown can be typed again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import InvalidInput
from moonpool.store.keys_text import key_bytes, read_key, show_key


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
