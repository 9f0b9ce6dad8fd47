"""The pure parts of the SSD log: formats, packing, the index's rules, recovery of damaged files, choice of a file."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ssd_world import BLOCK_NBYTES, parts_of

from moonpool.base.errors import ConfigError, StaleGeneration
from moonpool.node.ssd import layout
from moonpool.node.ssd.compactor import FileLoad, choose_victim
from moonpool.node.ssd.index import LogIndex
from moonpool.node.ssd.layout import UNIT_NBYTES, Entry, FileHeader
from moonpool.node.ssd.recovery import Reader, recover
from moonpool.node.ssd.writer import FileRoom, LogRecord, RecordBatch, largest_object_nbytes

FILE_NBYTES = 256 * 1024
HEADER = FileHeader(7, FILE_NBYTES, bytes(range(16)))

records = st.builds(
    LogRecord,
    st.binary(min_size=1, max_size=300),
    st.integers(0, 2**64 - 1),
    st.none() | st.integers(4096, 60_000),
    crc=st.none() | st.integers(0, 2**32 - 1),
)


def view(data: bytes) -> memoryview:
    return memoryview(data)


@given(st.lists(records, min_size=1, max_size=60), st.sampled_from([8192, 40_000, 10**9]))
def test_batches_fill_a_file_and_leave_room_for_the_index(wanted: list[LogRecord], batch_nbytes: int) -> None:
    room, entries, batches = FileRoom(FILE_NBYTES), [], []
    while wanted and (batch := room.plan(wanted, batch_nbytes, HEADER.number)) is not None:
        assert batch.offset == room.tail
        assert batch.end - batch.offset <= batch_nbytes or len(batch.entries) == 1
        room.advance(batch)
        entries += batch.entries
        batches.append(batch)
        wanted = wanted[len(batch.entries) :]
    ends = [UNIT_NBYTES]
    for batch in batches:
        packed = layout.pack_batch_header(batch.entries, batch.offset, batch.header_nbytes, batch.end, HEADER.nonce)
        assert layout.parse_batch(view(packed), batch.offset, HEADER) == batch.entries
        ends.append(batch.offset + batch.header_nbytes)
        for entry in batch.entries:
            assert entry.offset == (ends[-1] if entry.nbytes is not None else batch.offset)
            ends[-1] += entry.padded_nbytes
        assert ends[-1] == batch.end
    offset, footer = layout.pack_footer(entries, HEADER)
    assert offset >= ends[-1]
    assert offset + len(footer) == FILE_NBYTES
    trailer = layout.parse_trailer(view(footer[-UNIT_NBYTES:]), HEADER)
    assert trailer is not None
    assert layout.parse_index(view(footer[: trailer.index_nbytes]), trailer, HEADER) == entries


@given(st.integers(1, 5000))
def test_what_is_called_the_largest_object_fits(key_nbytes: int) -> None:
    most = largest_object_nbytes(FILE_NBYTES, key_nbytes)
    for nbytes, fits in ((most, True), (most + 1, False)):  # it is a multiple of 4 KiB
        batch = FileRoom(FILE_NBYTES).plan([LogRecord(bytes(key_nbytes), 1, nbytes)], 1 << 20, 1)
        assert (batch is not None) is fits


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(st.data())
def test_a_flipped_bit_is_noticed(data: st.DataObject) -> None:
    entries = [Entry(b"k" * 36, 5, 7, 8192, 5000), Entry(b"t" * 36, 5, 7, 4096, None)]
    batch = layout.pack_batch_header(entries, 4096, 4096, 16384, HEADER.nonce)
    used = len(batch.rstrip(b"\0"))
    assert layout.parse_batch(view(flipped(batch, data.draw(st.integers(0, 8 * used - 1)))), 4096, HEADER) is None
    head = layout.pack_file_header(HEADER)
    assert layout.parse_file_header(view(head), 7) == HEADER
    assert layout.parse_file_header(view(head), 8) is None
    used = len(head.rstrip(b"\0"))
    assert layout.parse_file_header(view(flipped(head, data.draw(st.integers(0, 8 * used - 1)))), 7) is None
    _, footer = layout.pack_footer(entries, HEADER)
    trailer = footer[-UNIT_NBYTES:]
    used = len(trailer.rstrip(b"\0"))
    assert layout.parse_trailer(view(flipped(trailer, data.draw(st.integers(0, 8 * used - 1)))), HEADER) is None


def header_of(nonce: bytes) -> FileHeader:
    return HEADER._replace(nonce=nonce)


def test_a_header_of_another_file_or_place_is_not_taken() -> None:
    entries = [Entry(b"k" * 36, 5, 7, 8192, 5000)]
    batch = view(layout.pack_batch_header(entries, 4096, 4096, 16384, HEADER.nonce))
    assert layout.parse_batch(batch, 4096, HEADER) == entries
    assert layout.parse_batch(batch, 8192, HEADER) is None
    assert layout.parse_batch(batch, 4096, header_of(bytes(16))) is None


def test_a_newer_version_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "VERSION", 2)
    head = layout.pack_file_header(HEADER)
    monkeypatch.undo()
    with pytest.raises(
        ConfigError, match=r"has format 2, and this is Moonpool .*, which reads format 1; start the Moonpool"
    ):
        layout.parse_file_header(view(head), 7)


class FileImage:
    """A log file in memory."""

    def __init__(self) -> None:
        self.data = bytearray(FILE_NBYTES)
        self.data[:UNIT_NBYTES] = layout.pack_file_header(HEADER)
        self.room = FileRoom(FILE_NBYTES)
        self.batches: list[RecordBatch] = []

    def write(self, *keys: bytes) -> RecordBatch:
        objects = [b"".join(parts_of(key, 1)) for key in keys]
        batch = self.room.plan([LogRecord(key, 1, len(o)) for key, o in zip(keys, objects, strict=True)], 1 << 20, 7)
        assert batch is not None
        head = layout.pack_batch_header(batch.entries, batch.offset, batch.header_nbytes, batch.end, HEADER.nonce)
        self.put(batch.offset, head)
        for entry, data in zip(batch.entries, objects, strict=True):
            self.put(entry.offset, data)
        self.room.advance(batch)
        self.batches.append(batch)
        return batch

    def seal(self) -> None:
        self.put(*layout.pack_footer([entry for batch in self.batches for entry in batch.entries], HEADER))

    def put(self, offset: int, data: bytes) -> None:
        self.data[offset : offset + len(data)] = data

    @property
    def read(self) -> Reader:
        return lambda offset, nbytes: memoryview(self.data)[offset : offset + nbytes]

    def found(self) -> list[bytes]:
        return [entry.key for entry in recover(self.read, HEADER).entries]


KEYS = [bytes([97 + number]) * 36 for number in range(5)]


def test_search_goes_on_behind_what_is_torn() -> None:
    image = FileImage()
    assert image.found() == []
    first, second, _ = image.write(*KEYS[:2]), image.write(*KEYS[2:4]), image.write(KEYS[4])
    assert image.found() == KEYS
    image.put(first.entries[1].offset + 5000, b"torn")
    image.put(second.offset, bytes(4))
    assert image.found() == [KEYS[0], KEYS[4]]
    assert recover(image.read, HEADER).num_torn == 1


def test_an_index_is_believed_only_when_it_is_right() -> None:
    image = FileImage()
    batch = image.write(*KEYS)
    image.seal()
    image.put(batch.offset, bytes(4))
    assert image.found() == KEYS  # by the index
    assert recover(image.read, HEADER).sealed
    index_at = FILE_NBYTES - 2 * UNIT_NBYTES
    image.put(index_at + 10, b"\xff")
    assert image.found() == []  # by search, and the batch has no header
    assert not recover(image.read, HEADER).sealed


def test_an_object_that_looks_like_the_log_is_not_taken_for_it() -> None:
    """An object may hold a copy of a log file, of this very log even: its nonce is of another file."""
    copied = FileImage()
    copied.write(KEYS[0])
    hostile = bytes(copied.data[UNIT_NBYTES : 4 * UNIT_NBYTES])
    other = header_of(b"n" * 16)
    image = bytearray(FILE_NBYTES)
    image[UNIT_NBYTES : UNIT_NBYTES + len(hostile)] = hostile
    assert recover(lambda at, nbytes: memoryview(image)[at : at + nbytes], other).entries == []


@given(st.integers(0, 2**32))
def test_random_damage_loses_at_most_what_it_hits(seed: int) -> None:
    rng = random.Random(seed)
    image = FileImage()
    for key in KEYS:
        image.write(key)
    hit = rng.randrange(UNIT_NBYTES, image.room.tail, BLOCK_NBYTES)
    image.put(hit, rng.randbytes(BLOCK_NBYTES))
    struck = next(number for number, batch in enumerate(image.batches) if hit < batch.end)
    assert set(KEYS) - set(image.found()) <= {KEYS[struck]}


entries = st.lists(
    st.tuples(st.sampled_from([b"k", b"l"]), st.integers(1, 3), st.integers(1, 3), st.booleans()),
    min_size=1,
    max_size=12,
).map(
    lambda rows: [
        Entry(key, generation, file, UNIT_NBYTES * (1 + number), None if dead else 100)
        for number, (key, generation, file, dead) in enumerate(rows)
    ]
)


def index_of(rows: list[Entry]) -> LogIndex:
    index = LogIndex()
    for number in (1, 2, 3):
        index.open_file(number)
    for entry in rows:
        index.add(entry)
    return index


@given(entries, st.randoms(use_true_random=False))
def test_the_last_record_of_the_highest_generation_counts(rows: list[Entry], rng: random.Random) -> None:
    index = index_of(rng.sample(rows, len(rows)))
    index.check_integrity()
    for key in (b"k", b"l"):
        newest = max((entry for entry in rows if entry.key == key), key=lambda entry: entry.order, default=None)
        assert index.find(key) is (newest if newest is not None and newest.nbytes is not None else None)


@given(entries, st.sampled_from([1, 2, 3]))
def test_a_file_may_go_when_its_living_and_its_tombstones_were_written_anew(rows: list[Entry], victim: int) -> None:
    index = index_of(rows)
    before = {entry.key: entry.generation for entry in index.live()}
    index.open_file(4)
    at = UNIT_NBYTES
    for tombstone in index.tombstones_to_keep(victim):
        index.add(Entry(tombstone.key, tombstone.generation, 4, at, None))
    for entry in list(index.live_of(victim)):
        at += UNIT_NBYTES
        index.add(Entry(entry.key, entry.generation, 4, at, entry.nbytes))
    index.drop_file(victim)
    index.check_integrity()
    assert {entry.key: entry.generation for entry in index.live()} == before


def test_an_older_generation_is_not_admitted() -> None:
    index = index_of([Entry(b"k", 3, 1, 4096, 100), Entry(b"k", 5, 1, 8192, None)])
    index.admit(b"k", 5)
    index.admit(b"l", 1)
    with pytest.raises(StaleGeneration):
        index.admit(b"k", 4)


def test_the_file_with_the_least_to_move_is_chosen() -> None:
    loads = {1: FileLoad(90, 100, 100), 2: FileLoad(30, 95, 100), 3: FileLoad(20, 60, 100), 4: FileLoad(51, 51, 100)}
    assert choose_victim(loads, 0.2) == 3
    assert choose_victim({1: loads[1], 4: loads[4]}, 0.2) is None  # all but full, or no second object would have fitted
    assert choose_victim({1: loads[1], 5: FileLoad(40, 40, 100)}, 0.2) == 5  # sealed half empty
    assert choose_victim({6: FileLoad(0, 100, 100), 5: FileLoad(0, 0, 100)}, 0.2) == 5
    assert choose_victim({}, 0.2) is None
