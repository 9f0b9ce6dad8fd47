"""Golden vectors of docs/formats.md: tenant root, chain keys, object keys. A change here is a new format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.keys import KEY_NBYTES, OBJECT_KEY_NBYTES, chain_keys, next_key, object_key, tenant_root

SECRET = bytes(range(32))
ROOT = bytes.fromhex("d4e758d6acffea4f80cd5db8c420d92c9cd591598bd76c1786e014eb54b934b3")
KEYS = [
    bytes.fromhex("5f0dd63d04f5ff9b90d9b70231d86f71cd12b168d0100cb6ef58c308f8260861"),
    bytes.fromhex("964abc0cd1cb06714692d04fe5a3ac6b496ea184fa172854d83d87906e561ad3"),
]
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_golden_root_and_chain() -> None:
    assert tenant_root(SECRET, bytes(32)) == ROOT
    assert chain_keys(ROOT, range(1, 10), 4) == KEYS  # the ninth token is a partial block and has no key


def test_golden_object_key() -> None:
    assert object_key(b"\xaa" * 32, 1, 513) == b"\xaa" * 32 + bytes.fromhex("01000102")
    assert len(object_key(KEYS[0])) == OBJECT_KEY_NBYTES
    assert object_key(KEYS[0], 7, 9)[:KEY_NBYTES] == KEYS[0]


@pytest.mark.parametrize(
    "as_type", [list, tuple, lambda t: np.asarray(t, np.int64), lambda t: np.asarray(t, np.uint32)]
)
def test_keys_do_not_depend_on_the_container(as_type: Callable[[list[int]], Any]) -> None:
    assert chain_keys(ROOT, as_type(list(range(1, 9))), 4) == KEYS


@given(TOKENS, st.integers(1, 8))
def test_chain_is_next_key_repeated(tokens: list[int], block_tokens: int) -> None:
    keys, previous = chain_keys(ROOT, tokens, block_tokens), ROOT
    assert len(keys) == len(tokens) // block_tokens
    for index, key in enumerate(keys):
        previous = next_key(previous, tokens[index * block_tokens : (index + 1) * block_tokens])
        assert key == previous


@given(st.lists(st.integers(0, 9), min_size=8, max_size=8), st.lists(st.integers(0, 9), min_size=8, max_size=8))
def test_keys_agree_exactly_as_far_as_the_tokens_do(left: list[int], right: list[int]) -> None:
    shared = next((i for i in range(8) if left[i] != right[i]), 8) // 2
    a, b = chain_keys(ROOT, left, 2), chain_keys(ROOT, right, 2)
    assert a[:shared] == b[:shared]
    assert not set(a[shared:]) & set(b[shared:])


def test_roots_differ_by_tenant_and_identity() -> None:
    roots = {tenant_root(secret, ident) for secret in (SECRET, bytes(16)) for ident in (bytes(32), b"\1" * 32)}
    assert len(roots) == 4


def test_a_token_that_is_no_u32_is_refused() -> None:
    with pytest.raises(OverflowError):
        chain_keys(ROOT, [-1, 2], 2)
