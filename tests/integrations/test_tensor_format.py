"""The header in front of a tensor, and cutting and joining parts: pure functions, checked for all types and shapes."""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.tensor_format import (
    ELEMENT_TYPES,
    HEADER_NBYTES,
    MANIFEST_NBYTES,
    AxisKind,
    Manifest,
    StoredAxis,
    TensorHeader,
    unpack_header,
    unpack_manifest,
)
from moonpool.integrations.mooncake.tensor_slicing import Cut, object_parts, tp_shards

shapes = st.lists(st.integers(0, 5), max_size=8).map(tuple)
element_types = st.integers(0, len(ELEMENT_TYPES) - 1)


@st.composite
def headers(draw: st.DrawFn) -> TensorHeader:
    shape = draw(shapes)
    axes = []
    for position in range(draw(st.integers(0, 4))):
        count = draw(st.integers(1, 2**31 - 1))
        axes.append(
            StoredAxis(
                draw(st.sampled_from(AxisKind)),
                position,
                draw(st.integers(0, count - 1)),
                count,
                draw(st.integers(-1, len(shape) - 1)),
                draw(st.integers(-(2**31), 2**31 - 1)),
                draw(st.integers(0, 2**40)),
            )
        )
    return TensorHeader(draw(element_types), draw(st.just(shape)), shape, draw(st.booleans()), tuple(axes))


@given(headers())
def test_a_header_comes_back_from_its_bytes(header: TensorHeader) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_NBYTES == 304
    assert unpack_header(packed, header.nbytes) == header


@given(element_types, shapes.filter(bool), st.data())
def test_a_manifest_comes_back_from_its_bytes(element_type: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    split_dim = data.draw(st.integers(0, len(shape) - 1))
    manifest = Manifest(element_type, shape, split_dim, data.draw(st.integers(1, 100)))
    assert len(manifest.pack()) == MANIFEST_NBYTES == 96
    assert unpack_manifest(manifest.pack()) == manifest


@given(headers(), st.integers(0, HEADER_NBYTES - 1), st.binary(min_size=1, max_size=8))
def test_any_bytes_are_a_header_or_invalid_input(header: TensorHeader, at: int, noise: bytes) -> None:
    spoiled = bytearray(header.pack())
    spoiled[at : at + len(noise)] = noise
    with suppress(InvalidInput):
        found = unpack_header(bytes(spoiled[:HEADER_NBYTES]), header.nbytes)
        assert found.nbytes == header.nbytes, "no header promises more than the object has"
        assert unpack_header(found.pack(), found.nbytes) == found


@given(st.binary(max_size=400))
def test_other_bytes_are_no_manifest(noise: bytes) -> None:
    with pytest.raises(InvalidInput):
        unpack_manifest(noise)


def test_the_fields_lie_where_upstream_has_them() -> None:
    axis = StoredAxis(AxisKind.TP, 0, 1, 2, 1, 0, 3)
    packed = TensorHeader(12, (4, 6), (4, 3), True, (axis,)).pack()
    assert struct.unpack_from("<IHHiiIIQQ", packed) == (0x4D4F4F4E, 1, 304, 12, 2, 1, 0, 304, 24)
    assert struct.unpack_from("<16q", packed, 40) == (4, 6, *[-1] * 6, 4, 3, *[-1] * 6)
    assert struct.unpack_from("<IIiiiiiiq", packed, 168) == (1, 0, 1, 0, 1, 2, 1, 0, 3)
    assert packed[208:] == bytes(96)


@pytest.mark.parametrize(
    "wrong",
    [
        {"element_type": 15},
        {"element_type": -1},
        {"global_shape": (4,)},
        {"local_shape": (-1, 2), "global_shape": (1, 2)},
        {"data_offset": 303},
        {"axes": (StoredAxis(AxisKind.DP, 0, 0, 1),) * 5},
        {"axes": (StoredAxis(AxisKind.DP, 0, 2, 2),)},
        {"axes": (StoredAxis(AxisKind.TP, 0, 0, 2, 2),)},
        {"global_shape": (1,) * 9, "local_shape": (1,) * 9},
    ],
)
def test_a_header_that_the_format_cannot_hold_is_refused(wrong: dict[str, object]) -> None:
    header = TensorHeader(0, (1, 2), (1, 2))
    with pytest.raises(InvalidInput):
        replace(header, **wrong)  # type: ignore[arg-type]


def test_a_header_must_fit_the_object() -> None:
    packed = TensorHeader(0, (2,), (2,)).pack()
    for nbytes in (0, 303, 304, 311, 313):
        with pytest.raises(InvalidInput):
            unpack_header(packed, nbytes)
    with pytest.raises(InvalidInput):
        unpack_header(packed[:300], 312)


# parts


@st.composite
def arrays_to_cut(draw: st.DrawFn) -> tuple[np.ndarray, Cut]:
    shape = list(draw(st.lists(st.integers(0, 4), min_size=1, max_size=5)))
    dim, count = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 5))
    shape[dim] *= count
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.float32, np.int64]))
    array = np.arange(np.prod(shape), dtype=dtype).reshape(shape)
    return array, Cut(tuple(shape), dim, count)


def bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).tobytes())


@given(arrays_to_cut())
def test_parts_are_those_of_numpy_and_join_to_the_whole(case: tuple[np.ndarray, Cut]) -> None:
    array, cut = case
    parts = []
    for rank, expected in enumerate(np.split(array, cut.count, axis=cut.dim)):
        part = cut.take(bytes_of(array), array.itemsize, rank)
        assert bytes(part) == expected.tobytes()
        assert cut.part_shape == expected.shape
        parts.append((rank, part))
    whole = bytearray(array.nbytes)
    cut.join(parts, array.itemsize, range(cut.shape[cut.dim]), memoryview(whole))
    assert bytes(whole) == array.tobytes()


@given(arrays_to_cut(), st.data())
def test_any_span_is_joined_from_the_parts_that_hold_it(case: tuple[np.ndarray, Cut], data: st.DataObject) -> None:
    array, cut = case
    size = cut.shape[cut.dim]
    start = data.draw(st.integers(0, size))
    span = range(start, data.draw(st.integers(start, size)))
    ranks = cut.overlapping(span)
    assert all(set(cut.span(rank)) & set(span) for rank in ranks)
    parts = [(rank, cut.take(bytes_of(array), array.itemsize, rank)) for rank in ranks]
    expected = array.take(span, axis=cut.dim)
    target = bytearray(expected.nbytes)
    cut.join(parts, array.itemsize, span, memoryview(target))
    assert bytes(target) == expected.tobytes()


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(-2, 5), st.integers(-1, 7))
def test_only_equal_parts_exist(shape: list[int], dim: int, count: int) -> None:
    if 0 <= dim < len(shape) and count > 0 and shape[dim] % count == 0:
        assert Cut(tuple(shape), dim, count).extent * count == shape[dim]
    else:
        with pytest.raises(InvalidInput):
            Cut(tuple(shape), dim, count)


def test_a_part_along_the_first_dimension_is_no_copy() -> None:
    data = bytearray(range(24))
    part = Cut((6, 4), 0, 3).take(memoryview(data), 1, 1)
    data[8] = 200
    assert bytes(part) == bytes([200, *range(9, 16)])


def test_parts_of_the_wrong_size_are_refused() -> None:
    cut = Cut((4, 2), 0, 2)
    with pytest.raises(InvalidInput):
        cut.take(memoryview(bytes(7)), 1, 0)
    with pytest.raises(InvalidInput):
        cut.span(2)
    with pytest.raises(InvalidInput):
        cut.join([(0, memoryview(bytes(3)))], 1, range(2), memoryview(bytearray(4)))
    with pytest.raises(InvalidInput):
        cut.join([], 1, range(4), memoryview(bytearray(7)))


def test_a_part_is_not_cut_again() -> None:
    with pytest.raises(InvalidInput):
        tp_shards(TensorHeader(3, (4,), (2,), True), memoryview(bytes(2)), 2, 0)


@given(element_types, st.lists(st.integers(0, 3), min_size=1, max_size=8), st.data())
def test_the_objects_of_all_parts_have_headers_that_fit(
    element_type: int, sizes: list[int], data: st.DataObject
) -> None:
    dim, tp_size = data.draw(st.integers(0, len(sizes) - 1)), data.draw(st.integers(2, 4))
    sizes[dim] *= tp_size
    header = TensorHeader(element_type, tuple(sizes), tuple(sizes))
    values = memoryview(np.random.default_rng(1).bytes(header.data_nbytes))
    shards = tp_shards(header, values, tp_size, dim)
    for rank, parts in enumerate(shards):
        stored = unpack_header(b"".join(parts))
        assert (stored.axes[0].rank, stored.axes[0].count, stored.axes[0].split_dim) == (rank, tp_size, dim)
        assert stored.global_shape == header.local_shape
    assert sum(len(b"".join(parts[1:])) for parts in shards) == header.data_nbytes
    assert len(b"".join(object_parts(header, values))) == header.nbytes
