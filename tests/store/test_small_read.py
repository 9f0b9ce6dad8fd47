"""Small objects are read with all checks, whatever their pieces and wherever they go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from facade_pool import FacadePool, facade_pool
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.checksum import crc32c
from moonpool.base.errors import IdentityMismatch, InvalidInput, StaleGeneration
from moonpool.base.object_header import ALIGN_NBYTES, GENERATION_AT, pack_header, void
from moonpool.store import Store
from moonpool.store.client.small_read import copy_small
from moonpool.store.messages import ObjectInfo, Placement

PIECES = st.lists(st.binary(max_size=64), min_size=1, max_size=4).filter(any)
PLACE = Placement("s", ALIGN_NBYTES, 1, 7)


def stored(pieces: list[bytes], generation: int = 7) -> tuple[bytearray, ObjectInfo]:
    """The object behind a page that is not its own."""
    header = pack_header(b"key", generation, [len(piece) for piece in pieces], [crc32c(piece) for piece in pieces])
    data = b"".join(pieces)
    info = ObjectInfo(key=b"key", nbytes=len(header) + len(data), replicas=(PLACE,), lease_s=1.0)
    return bytearray(b"x" * ALIGN_NBYTES + header + data), info


@given(pieces=PIECES, room=st.integers(0, 8), is_remembered=st.booleans())
def test_it_is_copied_as_it_was_put(pieces: list[bytes], room: int, is_remembered: bool) -> None:
    memory, info = stored(pieces)
    data = b"".join(pieces)
    view = memoryview(bytearray(b"?" * (len(data) + room)))
    assert copy_small(memoryview(memory), PLACE.offset, info, PLACE, None, view, is_remembered) == len(data)
    assert view == data + b"?" * room
    assert copy_small(memoryview(memory), PLACE.offset, info, PLACE, None, None, is_remembered) == data


@given(pieces=PIECES, bit=st.integers(0))
def test_a_flipped_bit_is_found(pieces: list[bytes], bit: int) -> None:
    memory, info = stored(pieces)
    flipped = bit % (8 * (info.nbytes - ALIGN_NBYTES))
    memory[2 * ALIGN_NBYTES + flipped // 8] ^= 1 << flipped % 8
    view = memoryview(bytearray(info.nbytes))
    assert copy_small(memoryview(memory), PLACE.offset, info, PLACE, None, view, False) is None
    assert copy_small(memoryview(memory), PLACE.offset, info, PLACE, None, None, False) is None


def test_what_left_its_place_is_not_read() -> None:
    memory, info = stored([b"data"])
    void(memoryview(memory), PLACE.offset, 7)
    assert copy_small(memoryview(memory), PLACE.offset, info, PLACE, None, None, True) is None
    assert copy_small(memoryview(memory), PLACE.offset, info, PLACE, None, None, False) == b"data", (
        "the master was asked"
    )
    other, _ = stored([b"data"], generation=8)
    with pytest.raises(StaleGeneration):
        copy_small(memoryview(other), PLACE.offset, info, PLACE, None, None, False)
    with pytest.raises(IdentityMismatch):
        copy_small(memoryview(memory), PLACE.offset, info, PLACE, b"i" * 32, None, False)


def test_space_that_changes_hands_during_the_copy_is_found() -> None:
    """The copy itself writes the next owner's generation over the header: the last moment at which it can."""
    memory, info = stored([b"%d" % number for number in range(8)])
    at = PLACE.offset + GENERATION_AT
    assert (
        copy_small(memoryview(memory), PLACE.offset, info, PLACE, None, memoryview(memory)[at : at + 8], False) is None
    )


# at remembered places


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FacadePool]:
    yield from facade_pool(tmp_path)


@pytest.fixture(params=["mapped", "tcp"])
def reader(pool: FacadePool, request: pytest.FixtureRequest) -> Store:
    return pool.store(shm=request.param == "mapped")


@pytest.mark.parametrize("pieces", [[b"a" * 5000], [b"a", b"", b"b" * 70_000], [b"c" * 400_000]])
def test_one_object_is_read_again_and_again(pool: FacadePool, reader: Store, pieces: list[bytes]) -> None:
    pool.store().put("k", pieces)
    data = b"".join(pieces)
    for room in (0, 10):
        into = bytearray(len(data) + room)
        assert reader.get("k") == data
        assert reader.get_into("k", into) == len(data)
        assert into == data + bytes(room)
    with pytest.raises(InvalidInput):
        reader.get_into("k", bytearray(len(data) - 1))
    assert reader.counters()["bytes_read"] == 4 * len(data)
    assert reader.counters()["hits"] >= 4


def test_values_of_another_identity_are_refused_at_remembered_places(pool: FacadePool, reader: Store) -> None:
    one, other = b"1" * 32, b"2" * 32
    pool.store().put("k", b"value", identity=one)
    assert reader.get("k") == b"value"
    assert reader.get_many(["k"], identity=one) == [b"value"]
    (got,) = reader.get_many_into(["k"], [bytearray(5)], identity=other)
    assert isinstance(got, IdentityMismatch)


def test_batches_of_small_and_large_objects_are_read(pool: FacadePool, reader: Store) -> None:
    values = {b"%d" % at: bytes([at % 256]) * (100 if at % 7 else 40_000) for at in range(300)}
    pool.store().put_many(values)
    for _ in range(2):
        assert reader.get_many([*values, b"missing"]) == [*values.values(), None]
        into = [bytearray(len(value)) for value in values.values()]
        assert reader.get_many_into(list(values), into) == [len(value) for value in values.values()]
        assert into == list(values.values())
