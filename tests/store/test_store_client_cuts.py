"""Which memory holds which bytes: pieces and buffers cut in every which way."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.errors import InvalidInput
from moonpool.store.client.cuts import cut_ranges, gather, scatter, without_overlaps
from moonpool.store.client.put_request import MAX_BATCH_NBYTES, MAX_BATCH_OBJECTS, Put, bundle_puts, put_start
from moonpool.store.messages import PutOptions

SIZES = st.lists(st.integers(0, 40), max_size=8)


@given(SIZES, SIZES)
def test_pieces_land_in_order_in_whatever_buffers_there_are(sizes: list[int], rooms: list[int]) -> None:
    data = random.Random(1).randbytes(sum(sizes))
    buffers = [bytearray(room) for room in rooms]
    targets = [memoryview(buffer) for buffer in buffers]
    if sum(rooms) < len(data):
        with pytest.raises(InvalidInput):
            scatter(sizes, targets)
        return
    pieces = scatter(sizes, targets)
    assert [sum(view.nbytes for view in views) for views in pieces] == sizes
    at = 0
    for view in (view for views in pieces for view in views):
        view[:] = data[at : at + view.nbytes]
        at += view.nbytes
    assert b"".join(buffers)[: len(data)] == data
    assert not any(b"".join(buffers)[len(data) :])


@given(SIZES, st.integers(1, 50))
def test_gathered_pieces_are_the_same_bytes(sizes: list[int], limit: int) -> None:
    views = [memoryview(random.Random(n).randbytes(size)) for n, size in enumerate(sizes)]
    pieces = gather(views, limit)
    assert b"".join(pieces) == b"".join(views)
    assert all(0 < piece.nbytes <= limit for piece in pieces)


@given(SIZES, st.data())
def test_ranges_touch_whole_pieces(sizes: list[int], data: st.DataObject) -> None:
    total = sum(sizes)
    value = random.Random(2).randbytes(total)
    starts = data.draw(st.lists(st.integers(0, total), max_size=6))
    buffers = [bytearray(data.draw(st.integers(0, total - start))) for start in starts]
    ranges = [(start, memoryview(buffer)) for start, buffer in zip(starts, buffers, strict=True)]
    bounds = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    for some in without_overlaps(ranges):
        for index, parts in cut_ranges(sizes, some):
            assert sum(nbytes for nbytes, _ in parts) == sizes[index], "a piece can only be verified whole"
            assert any(view is not None for _, view in parts), "and is left alone when nobody asks for it"
            at = bounds[index]
            for nbytes, view in parts:
                if view is not None:
                    view[:] = value[at : at + nbytes]
                at += nbytes
    for start, buffer in zip(starts, buffers, strict=True):
        assert buffer == value[start : start + len(buffer)]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=10))
def test_rounds_do_not_overlap(spans: list[tuple[int, int]]) -> None:
    rounds = without_overlaps([(start, memoryview(bytes(nbytes))) for start, nbytes in spans])
    assert sum(len(some) for some in rounds) == len(spans)
    for some in rounds:
        for (start, view), (following, _) in pairwise(some):
            assert start + view.nbytes <= following


def test_a_range_beyond_the_end_is_refused() -> None:
    with pytest.raises(InvalidInput, match="outside the object of 10 bytes"):
        cut_ranges([4, 6], [(8, memoryview(bytes(3)))])
    assert cut_ranges([4, 6], [(10, memoryview(b""))]) == []


def test_wishes_are_bundled_by_what_they_have_in_common() -> None:
    twice = PutOptions(num_replicas=2)
    puts = [Put(b"%d" % n, [b""], options=PutOptions(num_replicas=2) if n % 3 else PutOptions()) for n in range(9)]
    bundles = list(bundle_puts(puts, [1] * 9, range(9)))
    assert sorted(map(tuple, bundles)) == [(0, 3, 6), (1, 2, 4, 5, 7, 8)]
    call = put_start([puts[n] for n in bundles[1]], [1] * 6, 7, "here.dram")
    assert (call.options.num_replicas, call.options.preferred, call.session) == (twice.num_replicas, ("here.dram",), 7)
    assert (call.parents, call.groups) == (None, None)


def test_identity_parents_and_groups_are_told() -> None:
    puts = [Put(b"a", [b""], identity=b"i" * 32), Put(b"b", [b""], identity=b"i" * 32, parent=b"a", group=b"g")]
    call = put_start(puts, [1, 1], 0, None)
    assert call.options.identity == b"i" * 32
    assert (call.parents, call.groups) == ([b"", b"a"], [b"", b"g"])
    assert call.options.preferred == ()


def test_no_bundle_is_too_large() -> None:
    puts = [Put(b"%d" % n, [b""]) for n in range(2 * MAX_BATCH_OBJECTS + 1)]
    assert [len(some) for some in bundle_puts(puts, [1] * len(puts), range(len(puts)))] == [1000, 1000, 1]
    large = [MAX_BATCH_NBYTES // 2 + 1] * 3
    assert list(bundle_puts(puts, large, range(3))) == [[0], [1], [2]]
    assert list(bundle_puts(puts, [2 * MAX_BATCH_NBYTES], [0])) == [[0]], "one that is larger goes alone"
