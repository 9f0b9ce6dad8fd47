"""The object header: golden bytes, round trips, and no flipped bit goes unnoticed."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.base.checksum import ChecksumKind, crc32c
from moonpool.base.errors import Corrupt, IdentityMismatch, StaleGeneration
from moonpool.base.keys import object_key
from moonpool.base.object_header import (
    ALIGN_NBYTES,
    NO_IDENTITY,
    ObjectHeader,
    ObjectKind,
    Piece,
    announced_nbytes,
    header_nbytes,
    pack_header,
    pack_single,
    read_plain,
    unpack,
)

GOLDEN = ObjectHeader(
    key=object_key(bytes(range(32)), 1, 2),
    generation=7,
    pieces=(Piece(4096, 0xDEADBEEF), Piece(100, 1)),
    kind=ObjectKind.BLOCK,
    identity=b"\x11" * 32,
    valid_tokens=64,
)
GOLDEN_BYTES = bytes.fromhex(
    "4d504f42" "0100" "01" "01" "00000000" "40000000" "00100000" "02000000" "0700000000000000"
    + "11" * 32 + "2400" + bytes(range(32)).hex() + "01000200"
    "0010000000000000" "efbeadde" "6400000000000000" "01000000" "c0e5375b"
)  # fmt: skip

HEADERS = st.builds(
    ObjectHeader,
    key=st.binary(max_size=300),
    generation=st.integers(0, 2**64 - 1),
    pieces=st.lists(st.builds(Piece, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)), max_size=600).map(tuple),
    kind=st.sampled_from(ObjectKind),
    identity=st.binary(min_size=32, max_size=32),
    valid_tokens=st.integers(0, 2**32 - 1),
    checksum_kind=st.sampled_from(ChecksumKind),
)


def test_golden_bytes() -> None:
    packed = GOLDEN.pack()
    assert len(packed) == ALIGN_NBYTES
    assert packed.rstrip(b"\0") == GOLDEN_BYTES
    assert unpack(packed) == GOLDEN


@given(HEADERS)
@settings(max_examples=60)
def test_round_trip(header: ObjectHeader) -> None:
    packed = header.pack()
    assert len(packed) == header.nbytes == header_nbytes(len(header.key), len(header.pieces))
    assert len(packed) % ALIGN_NBYTES == 0
    assert unpack(memoryview(packed + b"the pieces")) == header


def test_pieces_follow_without_gaps() -> None:
    assert [GOLDEN.piece_offset(i) for i in range(3)] == [4096, 8192, 8292]


def test_every_single_bit_flip_is_corrupt() -> None:
    packed = GOLDEN.pack()
    for bit in range(len(GOLDEN_BYTES) * 8):
        bad = bytearray(packed)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Corrupt):
            unpack(bad)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_header_or_corrupt(data: bytes) -> None:
    with pytest.raises(Corrupt):
        unpack(data)


@given(st.integers(0, len(GOLDEN_BYTES) - 1))
def test_cut_short_is_corrupt(length: int) -> None:
    with pytest.raises(Corrupt):
        unpack(GOLDEN.pack()[:length])


@pytest.mark.parametrize("offset", [6, 7])
def test_an_unknown_kind_with_a_right_checksum_is_corrupt(offset: int) -> None:
    bad = bytearray(GOLDEN_BYTES)
    bad[offset] = 200
    bad[-4:] = struct.pack("<I", crc32c(bytes(bad[:-4])))
    with pytest.raises(Corrupt, match="unknown kind"):
        unpack(bad)


def test_check_tells_whose_bytes_they_are() -> None:
    GOLDEN.check(GOLDEN.key, 7, GOLDEN.identity)
    GOLDEN.check(GOLDEN.key, 7, None)
    with pytest.raises(StaleGeneration):
        GOLDEN.check(GOLDEN.key, 8, None)
    with pytest.raises(StaleGeneration):
        GOLDEN.check(b"other", 7, None)
    with pytest.raises(IdentityMismatch):
        GOLDEN.check(GOLDEN.key, 7, bytes(32))


def test_a_digest_of_another_length_is_not_cut_to_fit() -> None:
    with pytest.raises(AssertionError):
        ObjectHeader(key=b"k", generation=1, pieces=(), identity=b"\1" * 40).pack()


def test_a_header_announces_its_own_size() -> None:
    header = ObjectHeader(key=b"k", generation=1, pieces=(Piece(1, 2),) * 900)
    packed = header.pack()
    assert announced_nbytes(packed[:ALIGN_NBYTES]) == len(packed) == 3 * ALIGN_NBYTES
    with pytest.raises(Corrupt):
        announced_nbytes(packed[:20])


def test_the_short_way_finds_what_the_long_way_finds() -> None:
    raw = b"-" * 7 + pack_header(b"key", 5, [100], [77], identity=b"i" * 32)
    assert read_plain(raw, 7, b"key", 5, 100, None) == read_plain(raw, 7, b"key", 5, 100, b"i" * 32) == 77
    for other in ((b"kex", 5, 100, None), (b"key", 6, 100, None), (b"key", 5, 99, None), (b"key", 5, 100, b"j" * 32)):
        assert read_plain(raw, 7, *other) is None
    used = 7 + 66 + len(b"key") + 12 + 4
    for bit in range(7 * 8, used * 8):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        assert read_plain(damaged, 7, b"key", 5, 100, None) is None
    assert read_plain(raw[: used - 1], 7, b"key", 5, 100, None) is None


def test_the_short_way_leaves_unusual_headers_to_the_long_way() -> None:
    for header in (pack_header(b"key", 5, [60, 40], [1, 2]), pack_header(b"key", 5, [100], [0], checksum_kind=0)):
        assert read_plain(header, 0, b"key", 5, 100, None) is None
    long_key = b"k" * 4010  # its header has no room for a void mark
    assert read_plain(pack_header(long_key, 5, [100], [1]), 0, long_key, 5, 100, None) is None


@given(st.binary(min_size=1, max_size=300), st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 2**32 - 1))
def test_a_header_of_one_piece_is_the_same_in_two_parts(
    key: bytes, generation: int, nbytes: int, checksum: int
) -> None:
    whole = pack_header(key, generation, [nbytes], [checksum], kind=ObjectKind.BLOCK, valid_tokens=7)
    assert b"".join(pack_single(key, generation, nbytes, checksum, ObjectKind.BLOCK, NO_IDENTITY, 7)) == whole
