"""Identity digests: a golden vector, and different descriptions never share one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.keys import CacheIdentity

GOLDEN = CacheIdentity(
    model_name="golden",
    weights_digest="00" * 32,
    dtype="float32",
    num_layers=2,
    num_kv_heads=3,
    head_dim=64,
    block_tokens=4,
    piece_layout="kv,head,token,dim",
    rope="theta=10000",
)


def test_golden_digest() -> None:
    assert GOLDEN.digest().hex() == "51684b7343334a44a6530e374be90070793830018d24f874a2d9bb3271108d77"


@pytest.mark.parametrize("name", CacheIdentity.__struct_fields__)
def test_every_field_counts(name: str) -> None:
    value = getattr(GOLDEN, name)
    other = value + 1 if isinstance(value, int) else value + "x"
    assert msgspec.structs.replace(GOLDEN, **{name: other}).digest() != GOLDEN.digest()


def test_text_cannot_pose_as_another_field() -> None:
    one = msgspec.structs.replace(GOLDEN, dtype="a\nhash_scheme=b", hash_scheme="c")
    two = msgspec.structs.replace(GOLDEN, dtype="a", hash_scheme="b\nhash_scheme=c")
    assert one.digest() != two.digest()


@given(st.text(), st.text(), st.text(), st.text())
def test_equal_only_when_all_fields_are(a: str, b: str, c: str, d: str) -> None:
    one = msgspec.structs.replace(GOLDEN, model_name=a, rope=b)
    two = msgspec.structs.replace(GOLDEN, model_name=c, rope=d)
    assert (one.digest() == two.digest()) == ((a, b) == (c, d))
