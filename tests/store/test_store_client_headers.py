"""The fast headers are those of base/object_header.py, byte by byte, and see whatever is wrong with one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.object_header import ALIGN_NBYTES, ObjectHeader, ObjectKind, Piece, header_nbytes
from moonpool.store.client.headers import glance, pack_header, padded_nbytes

PIECES = st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**32 - 1)), max_size=400)


@given(
    key=st.binary(max_size=300),
    generation=st.integers(0, 2**64 - 1),
    pieces=PIECES,
    kind=st.sampled_from(ObjectKind),
    identity=st.binary(min_size=32, max_size=32),
    tokens=st.integers(0, 2**32 - 1),
)
def test_equal_to_the_reference(
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
    assert padded_nbytes(len(key), len(pieces)) == header_nbytes(len(key), len(pieces)) == len(raw)
    nbytes = len(raw) + sum(sizes)
    seen = glance(memoryview(raw), 0, nbytes, key, generation, identity)
    assert seen == (len(raw), tuple(sizes), tuple(checksums))
    assert glance(memoryview(bytes(64) + raw), 64, nbytes, key, generation, None) == seen
    assert glance(memoryview(raw), 0, nbytes + 1, key, generation, None) is None
    assert glance(memoryview(raw), 0, nbytes, key + b"x", generation, None) is None
    assert glance(memoryview(raw), 0, nbytes, key, generation ^ 1, None) is None
    assert glance(memoryview(raw), 0, nbytes, key, generation, bytes(31) + b"?") is None or identity[-1:] == b"?"


@given(st.integers(0, 8 * 114 - 1))
def test_every_flipped_bit_is_seen(bit: int) -> None:
    raw = bytearray(pack_header(b"k" * 32, 7, [100], [5]))
    raw[bit // 8] ^= 1 << bit % 8
    assert glance(memoryview(raw), 0, ALIGN_NBYTES + 100, b"k" * 32, 7, None) is None


@given(st.binary(max_size=200))
def test_nonsense_is_no_header(start: bytes) -> None:
    raw = start.ljust(ALIGN_NBYTES, b"\xff")
    assert glance(memoryview(raw), 0, 10 * ALIGN_NBYTES, b"k", 1, None) is None
    assert glance(memoryview(start), 0, 10 * ALIGN_NBYTES, b"k", 1, None) is None
