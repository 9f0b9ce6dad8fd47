"""The checks of a verified read: no header and no byte that is not the one asked for passes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.checksum import crc32c
from moonpool.base.errors import Corrupt, IdentityMismatch, MoonpoolError, StaleGeneration
from moonpool.base.object_header import (
    ALIGN_NBYTES,
    HeaderFields,
    ObjectHeader,
    ObjectKind,
    Piece,
    header_nbytes,
    pack_header,
    unpack,
)
from moonpool.store.client.verified_read import (
    are_right,
    check_header,
    check_piece,
    has_generation,
    is_unchanged,
    sum_arrived,
)
from moonpool.store.messages import ObjectInfo, Placement


def checked(
    raw: bytes | bytearray | memoryview, offset: int, nbytes: int, key: bytes, generation: int, identity: bytes | None
) -> HeaderFields | type[MoonpoolError]:
    """The header, or the error's class."""
    place = Placement("s", offset, 1, generation)
    info = ObjectInfo(key=key, nbytes=nbytes, replicas=(place,), lease_s=1.0)
    try:
        return check_header(memoryview(raw), offset, info, place, identity)
    except MoonpoolError as error:
        return type(error)


PIECES = st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**32 - 1)), max_size=400)


@given(
    key=st.binary(max_size=300),
    generation=st.integers(0, 2**64 - 1),
    pieces=PIECES,
    kind=st.sampled_from(ObjectKind),
    identity=st.binary(min_size=32, max_size=32),
    tokens=st.integers(0, 2**32 - 1),
)
def test_a_header_is_read_as_it_was_written(
    key: bytes, generation: int, pieces: list[tuple[int, int]], kind: ObjectKind, identity: bytes, tokens: int
) -> None:
    header = ObjectHeader(
        key=key,
        generation=generation,
        pieces=tuple(Piece(*piece) for piece in pieces),
        kind=kind,
        identity=identity,
        valid_tokens=tokens,
    )
    sizes, checksums = [nbytes for nbytes, _ in pieces], [checksum for _, checksum in pieces]
    raw = pack_header(key, generation, sizes, checksums, kind=kind, identity=identity, valid_tokens=tokens)
    assert raw == header.pack()
    assert header_nbytes(len(key), len(pieces)) == len(raw)
    assert unpack(raw) == header
    nbytes = len(raw) + sum(sizes)
    seen = checked(raw, 0, nbytes, key, generation, identity)
    assert isinstance(seen, HeaderFields)
    assert (seen.nbytes, seen.sizes, seen.checksums) == (len(raw), tuple(sizes), tuple(checksums))
    assert seen.header() == header
    assert checked(bytes(64) + raw, 64, nbytes, key, generation, None) == seen
    assert checked(raw, 0, nbytes + 1, key, generation, None) is Corrupt
    assert checked(raw, 0, nbytes, key + b"x", generation, None) is StaleGeneration
    assert checked(raw, 0, nbytes, key, generation ^ 1, None) is StaleGeneration
    other = bytes(31) + b"?"
    assert checked(raw, 0, nbytes, key, generation, other) is IdentityMismatch or identity == other


@given(st.integers(0, 8 * 114 - 1))
def test_every_flipped_bit_is_seen(bit: int) -> None:
    raw = bytearray(pack_header(b"k" * 32, 7, [100], [5]))
    raw[bit // 8] ^= 1 << bit % 8
    assert not isinstance(checked(raw, 0, ALIGN_NBYTES + 100, b"k" * 32, 7, None), HeaderFields)


@given(st.binary(max_size=200))
def test_nonsense_is_no_header(start: bytes) -> None:
    raw = start.ljust(ALIGN_NBYTES, b"\xff")
    assert checked(raw, 0, 10 * ALIGN_NBYTES, b"k", 1, None) is Corrupt
    assert checked(start, 0, 10 * ALIGN_NBYTES, b"k", 1, None) is Corrupt


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(0, 10_000), st.booleans())
def test_a_flipped_byte_of_any_piece_is_seen(parts: list[bytes], which: int, in_two: bool) -> None:
    raw = pack_header(b"k", 7, [len(part) for part in parts], [crc32c(part) for part in parts])
    header = checked(raw, 0, len(raw) + sum(map(len, parts)), b"k", 7, None)
    assert isinstance(header, HeaderFields)
    copies = [bytearray(part) for part in parts]
    views = [[memoryview(copy)[:3], memoryview(copy)[3:]] if in_two else [memoryview(copy)] for copy in copies]
    assert are_right(header, views, sum_arrived)
    for index, some in enumerate(views):
        check_piece(header, index, some)
    full = [index for index, copy in enumerate(copies) if copy]
    if full:
        hit = full[which % len(full)]
        copies[hit][which % len(copies[hit])] ^= 1 + which % 255
        assert not are_right(header, views, sum_arrived)
        with pytest.raises(Corrupt):
            check_piece(header, hit, views[hit])


def test_bytes_come_from_where_the_pieces_lie() -> None:
    """The copier is given the object's offsets."""
    raw = pack_header(b"k", 7, [3, 0, 4], [crc32c(b"abc"), 0, crc32c(b"defg")])
    header = checked(raw, 0, len(raw) + 7, b"k", 7, None)
    assert isinstance(header, HeaderFields)
    whole = raw + b"abcdefg"
    asked: list[int] = []

    def copy_and_sum(at: int, view: memoryview, found: int) -> int:
        asked.append(at)
        view[:] = whole[at : at + view.nbytes]
        return crc32c(view, found)

    into = bytearray(7)
    view = memoryview(into)
    assert are_right(header, [[view[:1], view[1:3]], [], [view[3:]]], copy_and_sum, len(raw))
    assert into == b"abcdefg"
    assert asked == [len(raw), len(raw) + 1, len(raw) + 3]


def test_a_header_that_changed_is_noticed() -> None:
    before, after = pack_header(b"k", 7, [1], [1]), pack_header(b"k", 8, [1], [1])
    assert is_unchanged(before, before[:64])
    assert not is_unchanged(before, after[:64])
    assert has_generation(memoryview(bytes(8) + before), 8, 7)
    assert not has_generation(memoryview(after), 0, 7)
