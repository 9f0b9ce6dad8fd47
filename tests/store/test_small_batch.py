"""A batch of small objects has what reading one after the other has, whatever is wrong with some of them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.base.checksum import crc32c
from moonpool.base.errors import MoonpoolError
from moonpool.base.header_columns import PlainHeaders
from moonpool.base.object_header import ALIGN_NBYTES, GENERATION, GENERATION_AT, pack_header, read_plain, void
from moonpool.store.client import small_batch
from moonpool.store.client.recovery import Targets
from moonpool.store.client.small_batch import FoundObject, SmallBatch, split_small
from moonpool.store.client.small_read import copy_small
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer.transports.base import RemoteSegment

IDENTITY = b"i" * 32
FAULTS = [
    "none",
    "generation",
    "void",
    "key",
    "identity",
    "header",
    "payload",
    "size",
    "kind",
    "no checksum",
    "beyond the end",
    "odd offset",
]


class Item(NamedTuple):
    key: bytes
    pieces: list[bytes]
    fault: str
    room: int | None  # of the target beyond the value; None: new bytes


ITEMS = st.lists(
    st.builds(
        Item,
        st.sampled_from([b"k", b"key", b"x" * 67, b"y" * 67, b"z" * 4010]),
        st.one_of(
            st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=1),
            st.lists(st.binary(max_size=40), min_size=1, max_size=3).filter(any),
        ),
        st.one_of(st.just("none"), st.sampled_from(FAULTS)),
        st.one_of(st.none(), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=40,
)


class Batch:
    """Objects in one memory, each as its item says."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.memory, self.found, self.items = bytearray(), list[FoundObject](), items
        for number, item in enumerate(items):
            self._add(number, item)

    def _add(self, number: int, item: Item) -> None:
        data, generation = b"".join(item.pieces), number + 1
        self.memory += bytes(-len(self.memory) % 8 + (4 if item.fault == "odd offset" else 0))
        offset, stored_key = len(self.memory), item.key
        if item.fault == "key":
            stored_key = bytes([item.key[0] ^ 1]) + item.key[1:]
        header = pack_header(
            stored_key,
            generation + (item.fault == "generation"),
            [len(piece) for piece in item.pieces],
            [crc32c(piece) for piece in item.pieces],
            kind=7 if item.fault == "kind" else 0,
            identity=bytes(32) if item.fault == "identity" else IDENTITY,
            checksum_kind=0 if item.fault == "no checksum" else 1,
        )
        self.memory += header + data
        if item.fault == "header":
            self.memory[offset + 12] ^= 1
        elif item.fault == "payload":
            self.memory[-1] ^= 1
        elif item.fault == "void":
            void(memoryview(self.memory), offset, generation)
        nbytes = len(header) + len(data) + (item.fault == "size")
        place = Placement("s", 1 << 40 if item.fault == "beyond the end" else offset, 1, generation)
        self.found.append((number, ObjectInfo(item.key, nbytes, (place,), 1.0), place))

    def targets(self) -> list[Targets]:
        sizes = [info.nbytes - ALIGN_NBYTES for _, info, _ in self.found]
        return [
            None if item.room is None else [memoryview(bytearray(b"?" * (max(nbytes, 0) + item.room)))]
            for item, nbytes in zip(self.items, sizes, strict=True)
        ]


def one_by_one(
    batch: Batch, found: list[FoundObject], targets: list[Targets], identity: bytes | None, old: bool
) -> list[int | bytes | None]:
    got: list[int | bytes | None] = []
    for position, info, place in found:
        into = targets[position]
        view = None if into is None else into[0]
        try:
            got.append(copy_small(memoryview(batch.memory), place.offset, info, place, identity, view, old))
        except MoonpoolError:
            got.append(None)
    return got


@contextmanager
def batches_of_any_size() -> Iterator[None]:
    with patch.object(small_batch, "_LEAST_OBJECTS", 1):
        yield


@given(items=ITEMS, identity=st.sampled_from([None, IDENTITY, b"j" * 32, b"i"]), is_remembered=st.booleans())
def test_a_batch_reads_what_one_by_one_reads(items: list[Item], identity: bytes | None, is_remembered: bool) -> None:
    batch = Batch(items)
    targets, expected = batch.targets(), batch.targets()
    small, _ = split_small(batch.found, targets)
    offsets = [place.offset for _, _, place in small]
    with batches_of_any_size():
        got = SmallBatch(targets, identity, is_remembered).copy(memoryview(batch.memory), offsets, small)
    right = one_by_one(batch, small, expected, identity, is_remembered)
    assert got == right
    for (position, _, _), each in zip(small, right, strict=True):
        if isinstance(each, int):
            assert targets[position] == expected[position], "the value, and nothing behind it"


def plain(number: int, change: Callable[[memoryview], None] = lambda memory: None) -> Batch:
    """Objects that are alike and in order, with what `change` does to their memory."""
    batch = Batch([Item(b"key%03d" % at, [b"value%03d" % at], "none", 0) for at in range(number)])
    change(memoryview(batch.memory))
    return batch


@pytest.mark.parametrize("number", [1, 23, 24, 100])
def test_objects_that_are_alike_are_all_read(number: int) -> None:
    batch = plain(number)
    targets: list[Targets] = [[memoryview(bytearray(10))] for _ in range(number)]
    offsets = [place.offset for _, _, place in batch.found]
    got = SmallBatch(targets, IDENTITY, True).copy(memoryview(batch.memory), offsets, batch.found)
    assert got == [8] * number
    assert [bytes(into[0]) for into in targets if into] == [b"value%03d\0\0" % at for at in range(number)]


def test_most_objects_are_read_by_the_batch_itself() -> None:
    batch = plain(50)
    batch.memory[batch.found[7][2].offset + ALIGN_NBYTES] ^= 1
    offsets = [place.offset for _, _, place in batch.found]
    with patch.object(small_batch, "copy_small", return_value=None) as copy_one:
        got = SmallBatch([None] * 50, None, False).copy(memoryview(batch.memory), offsets, batch.found)
    assert got == [None if at == 7 else b"value%03d" % at for at in range(50)]
    assert copy_one.call_count == 1


def test_space_that_changes_hands_during_the_copies_is_found() -> None:
    """The copy of the third object writes another generation over the header of the first, which was copied before."""
    batch = plain(30)
    memory, offsets = memoryview(batch.memory), [place.offset for _, _, place in batch.found]
    targets: list[Targets] = [None] * 30
    targets[2] = [memory[offsets[0] + GENERATION_AT : offsets[0] + GENERATION_AT + GENERATION.size]]
    got = SmallBatch(targets, None, False).copy(memory, offsets, batch.found)
    assert got == [None, b"value001", 8, *[b"value%03d" % at for at in range(3, 30)]]


def test_a_void_mark_counts_from_before_the_first_copy() -> None:
    """The copies come after all void marks were looked at: an object that is void by then is not read."""
    batch = plain(30)
    memory, offsets = memoryview(batch.memory), [place.offset for _, _, place in batch.found]
    void(memory, offsets[5], 6)
    got = SmallBatch([None] * 30, None, True).copy(memory, offsets, batch.found)
    assert [at for at, each in enumerate(got) if each is None] == [5]
    assert None not in SmallBatch([None] * 30, None, False).copy(memory, offsets, batch.found), "the master was asked"


@given(bit=st.integers(0, 8 * (66 + 6 + 12 + 4) - 1), at=st.integers(0, 29))
def test_a_flipped_bit_in_one_header_of_many_is_found(bit: int, at: int) -> None:
    batch = plain(30)
    offsets = [place.offset for _, _, place in batch.found]
    batch.memory[offsets[at] + bit // 8] ^= 1 << bit % 8
    headers = PlainHeaders(memoryview(batch.memory), offsets, list(range(1, 31)))
    is_plain, checksums = headers.read([info.key for _, info, _ in batch.found], [8] * 30, IDENTITY)
    assert is_plain.tolist() == [number != at for number in range(30)]
    for number, (_, info, place) in enumerate(batch.found):
        one = read_plain(batch.memory, place.offset, info.key, place.generation, 8, IDENTITY)
        assert one == (int(checksums[number]) if is_plain[number] else None)


@pytest.mark.parametrize(
    ("nbytes", "targets", "fits"),
    [(0, None, False), (8, None, True), (8, [8], True), (8, [7], False), (8, [4, 4], False), (17 * 1024, None, False)],
)
def test_only_small_ones_with_room_are_read_so(nbytes: int, targets: list[int] | None, fits: bool) -> None:
    place = Placement("s", 0, 1, 7)
    each = (0, ObjectInfo(key=b"k", nbytes=ALIGN_NBYTES + nbytes, replicas=(place,), lease_s=1.0), place)
    views: Targets = None if targets is None else [memoryview(bytearray(size)) for size in targets]
    assert split_small([each], [views]) == (([each], []) if fits else ([], [each]))


# from a segment whose owner checks generations


class Owner:
    """A remote segment in this process. `lost` are generations that the owner finds to be given away."""

    def __init__(self, memory: bytearray, lost: set[int]) -> None:
        self._memory, self._lost = memory, lost

    def read_expecting(
        self, batches: Iterable[Sequence[tuple[int, memoryview, int]]], *, timeout_s: float
    ) -> Generator[set[int], None, None]:
        for items in list(batches):  # all are under way before the first arrives
            for offset, view, _ in items:
                view[:] = self._memory[offset : offset + view.nbytes]
            yield {at for at, (_, _, generation) in enumerate(items) if generation in self._lost}


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=150),
    lost=st.sets(st.integers(1, 150)),
    damaged=st.sets(st.integers(1, 150)),
    is_new=st.booleans(),
)
def test_a_batch_has_every_object_that_passes_the_checks(
    sizes: list[int], lost: set[int], damaged: set[int], is_new: bool
) -> None:
    memory, found, values, targets = bytearray(), [], [], list[Targets]()
    for at, nbytes in enumerate(sizes):
        key, generation, value = b"%d" % at, at + 1, bytes([at]) * nbytes
        place = Placement("s", len(memory), 1, generation)
        memory += pack_header(key, generation, [nbytes], [crc32c(value)]) + value
        if generation in damaged:
            memory[-1] ^= 1
        found.append((at, ObjectInfo(key, len(memory) - place.offset, (place,), 1.0), place))
        values.append(value)
        targets.append(None if is_new else [memoryview(bytearray(nbytes))])
    owner = cast("RemoteSegment", Owner(memory, lost))
    got = dict(SmallBatch(targets, None, False).fetch(owner, found, lambda nbytes: 1.0))
    right = set(range(len(sizes))) - {generation - 1 for generation in lost | damaged}
    assert set(got) == right
    for position in right:
        into = targets[position]
        assert got[position] == (values[position] if into is None else sizes[position])
        assert into is None or into[0] == values[position]


@pytest.mark.parametrize("nbytes", [4096, 4099])
def test_objects_of_any_size_are_checked_together_when_they_were_received(nbytes: int) -> None:
    memory, found = bytearray(), list[FoundObject]()
    for at in range(100):
        place = Placement("s", len(memory), 1, at + 1)
        value = bytes([at]) * nbytes
        memory += pack_header(b"%03d" % at, at + 1, [nbytes], [crc32c(value)]) + value + bytes(-nbytes % 4096)
        found.append((at, ObjectInfo(b"%03d" % at, ALIGN_NBYTES + nbytes, (place,), 1.0), place))
    owner = cast("RemoteSegment", Owner(memory, set()))
    with patch.object(small_batch, "copy_small", side_effect=AssertionError("one by one")):
        got = dict(SmallBatch([None] * 100, None, False).fetch(owner, found, lambda nbytes: 1.0))
    assert got == {at: bytes([at]) * nbytes for at in range(100)}
