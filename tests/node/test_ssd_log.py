"""The SSD log by its calls: what is appended comes back, newer wins, removed stays removed, space is bounded."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_world import seal
from ssd_world import KIB, SMALL, copy_as_is, inventory, item_of, log_files, parts_of, read_object
from waiting import HANG_S

from moonpool.base.checksum import ChecksumKind
from moonpool.base.errors import (
    ConfigError,
    Corrupt,
    HandleClosed,
    InvalidInput,
    NoSpace,
    StaleGeneration,
    Unavailable,
)
from moonpool.node.ssd import LogItem, LogLocation, LogRead, SsdConfig, SsdLog
from moonpool.transfer import FileSegment, SegmentDescriptor, host_id
from moonpool.transfer.disk.sidecar import Sidecar
from moonpool.transfer.memory.buffers import aligned_buffer
from moonpool.transfer.transports.file.transport import FileTransport

A, B, C = b"a" * 36, b"b" * 36, b"c" * 36


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SsdLog]:
    with SsdLog.open(tmp_path / "log", SMALL) as made:
        yield made
        if not made._closed:
            made.check_integrity()


def reopened(log: SsdLog, tmp_path: Path) -> SsdLog:
    log.close()
    return SsdLog.open(tmp_path / "log", SMALL)


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_an_object_comes_back_as_it_was(tmp_path: Path, where: str) -> None:
    """With direct I/O where the disk has it, and without on a file system in memory."""
    shm = Path("/dev/shm") / f"moonpool-ssd-{os.getpid()}-{tmp_path.name}"
    folder = tmp_path if where == "disk" or not shm.parent.is_dir() else shm
    parts = parts_of(A, 3, (10, 4096, 70_000, 1, 0))
    config = SsdConfig(max_nbytes=3 << 20, file_nbytes=1 << 20)
    try:
        with SsdLog.open(folder / "log", config) as log:
            location = log.append(A, 3, parts)
            assert location.offset % 4096 == 0
            assert read_object(log, A, 3) == b"".join(parts)
            file = Path(log.path_of(location.file_number)).read_bytes()
            assert file[location.offset : location.offset + location.nbytes] == b"".join(parts)
            assert log.file_nbytes(location.file_number) == len(file) == 1 << 20
    finally:
        if folder is shm:
            for path in sorted(shm.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            shm.rmdir()


def test_it_is_found_again_by_index_or_by_search(log: SsdLog, tmp_path: Path) -> None:
    results = log.append_many([item_of(key, 1) for key in (A, B, C)])
    log.remove([(B, 1)])
    expected = {A: 1, C: 1}
    with SsdLog.open(copy_as_is(tmp_path / "log", tmp_path / "killed"), SMALL) as searched:
        assert inventory(searched) == expected
        assert [searched.find(A, 1), searched.find(B, 1), searched.find(A, 2)] == [results[0], None, None]
        assert read_object(searched, C, 1) == b"".join(parts_of(C, 1))
    with reopened(log, tmp_path) as indexed:
        assert inventory(indexed) == expected
        assert read_object(indexed, A, 1) == b"".join(parts_of(A, 1))
        indexed.append(B, 2, parts_of(B, 2))
        assert inventory(indexed) == {A: 1, B: 2, C: 1}


def test_a_file_that_was_searched_is_not_searched_again(log: SsdLog, tmp_path: Path) -> None:
    log.append(A, 1, parts_of(A, 1))
    killed = copy_as_is(tmp_path / "log", tmp_path / "killed")
    SsdLog.open(killed, SMALL).close()
    (path,) = log_files(killed)
    data = bytearray(path.read_bytes())
    data[4096 : 2 * 4096] = bytes(4096)  # the batch's header: only the new index still knows the object
    path.write_bytes(data)
    with SsdLog.open(killed, SMALL) as again:
        assert read_object(again, A, 1) == b"".join(parts_of(A, 1))


def test_only_one_owner(log: SsdLog, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in use by another node"):
        SsdLog.open(tmp_path / "log", SMALL)
    reopened(log, tmp_path).close()


def test_the_newer_generation_wins(log: SsdLog, tmp_path: Path) -> None:
    log.append(A, 5, parts_of(A, 5))
    log.append(A, 7, parts_of(A, 7))
    with pytest.raises(StaleGeneration, match="knows"):
        log.append(A, 6, parts_of(A, 6))
    assert log.remove([(A, 6), (B, 1)]) == 0
    assert inventory(log) == {A: 7}
    both = log.append_many([item_of(B, 2), item_of(B, 1)])
    assert isinstance(both[0], LogLocation)
    assert isinstance(both[1], StaleGeneration)
    with reopened(log, tmp_path) as again:
        assert inventory(again) == {A: 7, B: 2}


def test_the_same_object_may_come_a_second_time(log: SsdLog, tmp_path: Path) -> None:
    log.append(A, 5, parts_of(A, 5))
    assert log.remove([(A, 5)]) == 1
    second = log.append(A, 5, parts_of(A, 5))
    with reopened(log, tmp_path) as again:
        assert again.find(A, 5) == second


def test_each_item_has_its_own_result(log: SsdLog) -> None:
    broken = [bytes(4096), b"x" * 5000]
    long = SMALL.file_nbytes
    results = log.append_many(
        [
            item_of(A, 1),
            LogItem(B, 1, parts_of(A, 1)),
            LogItem(B, 1, broken),
            LogItem(C, 1, [*parts_of(C, 1), b"more"]),
            item_of(C, 1, (long,)),
            LogItem(C, 1, []),
            item_of(B, 2),
        ]
    )
    kinds = [type(result) for result in results]
    assert kinds == [LogLocation, StaleGeneration, Corrupt, InvalidInput, InvalidInput, Corrupt, LogLocation]
    assert inventory(log) == {A: 1, B: 2}


def test_parts_may_be_cut_anywhere(tmp_path: Path) -> None:
    with SsdLog.open(tmp_path, SsdConfig(max_nbytes=32 << 20, file_nbytes=4 << 20, batch_nbytes=64 * KIB)) as log:
        for number, size in enumerate((0, 1, 4095, 65_536, 200_001, 3 << 20)):
            key, whole = b"%036d" % number, b"".join(parts_of(b"%036d" % number, 1, (size,)))
            memory = aligned_buffer(len(whole) + 8)
            for start in (0, 8):  # aligned and not
                memory[start : start + len(whole)] = whole
                view = memory[start : start + len(whole)]
                third = len(whole) // 3
                log.append(key, 1, [view[:third], view[third : 2 * third], view[2 * third :]])
                location = log.append(key, 1, [view])
                target = bytearray(len(whole))
                halves = memoryview(target)[: len(whole) // 2], memoryview(target)[len(whole) // 2 :]
                log.read_into(location, halves, key=key, generation=1)
                assert target == whole
                log.remove([(key, 1)])
                log.compact(1)
                for file in log.drained():
                    log.release(file)


def changed(read: LogRead, **fields: Any) -> LogRead:
    return read._replace(**fields)


def test_many_are_read_at_once(log: SsdLog) -> None:
    items = [item_of(b"%036d" % number, 1, (4096 + number % 2,)) for number in range(20)]
    locations = log.append_many(items)
    reads = [
        LogRead(item.key, 1, location, [bytearray(location.nbytes)])
        for item, location in zip(items, locations, strict=True)
        if isinstance(location, LogLocation)
    ]
    assert log.read_many([]) == []
    assert log.read_many(reads[::-1]) == [None] * 20
    assert [bytes(read.buffers[0]) for read in reads] == [b"".join(item.parts) for item in items]  # type: ignore[arg-type]
    wrong = [changed(reads[0], generation=2), reads[1], changed(reads[2], key=A)]
    answers = log.read_many(wrong)
    assert isinstance(answers[0], StaleGeneration)
    assert answers[1] is None
    assert isinstance(answers[2], StaleGeneration)
    with pytest.raises(InvalidInput):
        log.read_many([changed(reads[0], buffers=[bytearray(5)])])


def test_objects_without_checksums_are_checked_too(log: SsdLog, tmp_path: Path) -> None:
    parts = parts_of(A, 1, (9000,), ChecksumKind.NONE)
    location = log.append(A, 1, parts)
    assert read_object(log, A, 1) == b"".join(parts)
    damage(Path(log.path_of(location.file_number)), location.offset + 5000)
    with pytest.raises(Corrupt):
        read_object(log, A, 1)
    with SsdLog.open(copy_as_is(tmp_path / "log", tmp_path / "killed"), SMALL) as searched:
        assert inventory(searched) == {}
        assert searched.stats().num_torn == 1


def damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def test_damage_is_refused_counted_and_left_behind(log: SsdLog) -> None:
    location, other = (log.append(key, 1, parts_of(key, 1)) for key in (A, B))
    log.append(C, 1, parts_of(C, 1))
    damage(Path(log.path_of(location.file_number)), location.offset + 6000)
    for expected in (1, 2):
        with pytest.raises(Corrupt):
            read_object(log, A, 1)
        assert log.stats().num_corrupt == expected
    seal(log)
    log.remove([(C, 1)])
    moved = {one.key: one for one in log.compact(1 << 20)}
    assert moved[A].new is None
    assert moved[A].old == location
    assert moved[B].old == other
    assert inventory(log) == {B: 1}
    assert log.stats().num_corrupt == 3


def test_space_is_bounded_and_comes_back(log: SsdLog, tmp_path: Path) -> None:
    """Full; what is removed makes room after compaction and release, for ever."""
    number = 0
    for _ in range(3):
        refused = None
        while refused is None:
            number += 1
            (result,) = log.append_many([item_of(b"%036d" % number, number)])
            refused = result if not isinstance(result, LogLocation) else None
        assert isinstance(refused, NoSpace)
        assert "remove objects" in str(refused)
        assert log.stats().free_nbytes < 64 * KIB
        stored = sorted(log.items(), key=lambda one: one.generation)
        log.remove([(one.key, one.generation) for one in stored[: 2 * len(stored) // 3]])
        kept = {one.key: one.generation for one in stored[2 * len(stored) // 3 :]}
        while log.compact(1):
            for file in log.drained():
                log.release(file)
        assert inventory(log) == kept
        log.check_integrity()
    sizes = sum(path.stat().st_size for path in (tmp_path / "log").iterdir())
    assert sizes <= SMALL.max_nbytes


def test_a_full_log_that_is_emptied_takes_objects_again(log: SsdLog) -> None:
    """The worst case for tombstones: everything goes, one by one, while nothing may be appended."""
    number = 0
    while isinstance(log.append_many([item_of(b"%036d" % number, 1, (1,))])[0], LogLocation):
        number += 1
    for stored in list(log.items()):
        log.remove([(stored.key, stored.generation)])
    assert inventory(log) == {}
    log.compact(1)
    for _ in range(SMALL.max_nbytes // SMALL.file_nbytes):
        for file in log.drained():
            log.release(file)
        log.compact(1)
    log.append(A, 1, parts_of(A, 1))
    log.sync()
    assert log.stats().num_pending_tombstones == 0


def test_a_drained_file_waits_for_its_readers(log: SsdLog, tmp_path: Path) -> None:
    first = log.append(A, 1, parts_of(A, 1))
    log.append(B, 1, parts_of(B, 1, (20_000,)))
    with pytest.raises(InvalidInput, match="not drained"):
        log.release(first.file_number)
    seal(log)
    log.remove([(B, 1)])
    (moved,) = log.compact(1 << 20)
    assert (moved.key, moved.old, moved.new) == (A, first, log.find(A, 1))
    assert log.drained() == [first.file_number]
    assert read_object(log, A, 1, first) == b"".join(parts_of(A, 1))  # a reader with a lease
    Path(log.path_of(first.file_number) + ".fence").touch()  # it was served as a segment
    log.release(first.file_number)
    assert not list((tmp_path / "log").glob("*.fence"))
    with pytest.raises(Unavailable, match="any more"):
        read_object(log, A, 1, first)
    assert read_object(log, A, 1) == b"".join(parts_of(A, 1))
    assert log.drained() == []


def test_a_peer_reads_the_file_as_a_segment(log: SsdLog) -> None:
    """What the node will do for readers elsewhere: same place, same bytes, same checks."""
    location = log.append(A, 1, parts_of(A, 1))
    path, nbytes = log.path_of(location.file_number), log.file_nbytes(location.file_number)
    Sidecar.create(path, nbytes, None).close()
    transport = FileTransport()
    with FileSegment.open(path, incarnation=1) as segment:
        endpoint = transport.serve(segment)
        descriptor = SegmentDescriptor(
            name=segment.name, nbytes=nbytes, incarnation=1, host=host_id(), endpoints=(endpoint,)
        )
        peer = transport.open(descriptor, endpoint, timeout_s=1.0)
        target = bytearray(location.nbytes)
        peer.read_into(location.offset, [target], timeout_s=HANG_S)
        assert target == b"".join(parts_of(A, 1))
        peer.close()
        transport.close()


def test_a_tombstone_outlives_its_file(log: SsdLog, tmp_path: Path) -> None:
    """The file with the tombstone goes before the one with the object that it hides."""
    log.append_many([item_of(A, 1), item_of(B, 1, (30_000,))])
    seal(log)
    log.remove([(A, 1)])
    log.append(C, 1, parts_of(C, 1))
    seal(log)
    log.remove([(C, 1)])
    seal(log)
    drained: set[int] = set()
    while new := (log.compact(0), set(log.drained()) - drained)[1]:
        drained |= new
        for file in new - {1}:
            log.release(file)
    with SsdLog.open(copy_as_is(tmp_path / "log", tmp_path / "killed"), SMALL) as again:
        assert A not in inventory(again)
        assert C not in inventory(again)


def test_a_closed_log_says_so(log: SsdLog) -> None:
    location = log.append(A, 1, parts_of(A, 1))
    log.close()
    log.close()
    with pytest.raises(HandleClosed):
        log.append(A, 2, parts_of(A, 2))
    with pytest.raises(HandleClosed):
        read_object(log, A, 1, location)
    with pytest.raises(HandleClosed):
        log.sync()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_nbytes": 1 << 20},
        {"max_nbytes": 1 << 40, "file_nbytes": 100_000},
        {"max_nbytes": 1 << 40, "batch_nbytes": 5000},
        {"max_nbytes": 1 << 40, "compact_dead_fraction": 0.0},
        {"max_nbytes": 1 << 40, "max_open_files": 0},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        SsdConfig(**wrong)


def test_readers_writers_and_compaction_at_once(tmp_path: Path) -> None:
    """Readers see right bytes all the while: from the old place until release, from the new one after."""
    config = SsdConfig(max_nbytes=12 * 64 * KIB, file_nbytes=64 * KIB, batch_nbytes=32 * KIB, max_open_files=2)
    stable = [b"s%035d" % number for number in range(12)]
    done = threading.Event()
    failures: list[BaseException] = []

    def read_all() -> None:
        try:
            while not done.is_set():
                for key in stable:
                    location = log.find(key, 1)
                    assert location is not None
                    with reading:
                        location = log.find(key, 1)
                        assert read_object(log, key, 1, location) == b"".join(parts_of(key, 1))
        except BaseException as error:  # noqa: BLE001  # told to the test
            failures.append(error)

    with SsdLog.open(tmp_path, config) as log:
        reading = threading.Lock()  # stands for the lease: release waits for it
        log.append_many([item_of(key, 1) for key in stable])
        readers = [threading.Thread(target=read_all) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            for generation in range(1, 120):
                log.append_many([item_of(A, generation), item_of(B, generation)])
                if generation % 3 == 0:
                    log.remove([(A, generation)])
                log.compact(20 * KIB)
                for file in log.drained():
                    with reading:
                        log.release(file)
        finally:
            done.set()
            for reader in readers:
                reader.join()
        log.check_integrity()
    assert failures == []


def test_a_start_gives_up_files_that_nobody_needs(log: SsdLog, tmp_path: Path) -> None:
    """An owner that dies often never lives to tidy up."""
    keys = [b"key-%d" % number for number in range(4)]
    for generation in range(1, 40):
        results = log.append_many([item_of(key, generation) for key in keys])
        if any(isinstance(result, NoSpace) for result in results):
            break
        if generation % 2:
            log.remove([(key, generation) for key in keys[::2]])
    log.sync()
    before, full = inventory(log), len(log_files(tmp_path / "log"))
    assert full >= 5
    with SsdLog.open(copy_as_is(tmp_path / "log", tmp_path / "killed"), SMALL) as again:
        assert inventory(again) == before
        again.check_integrity()
        assert again.stats().num_files <= 4
        assert log_files(tmp_path / "killed") != []
    with SsdLog.open(tmp_path / "killed", SMALL) as once_more:
        assert inventory(once_more) == before, "nothing removed has come back with what was given up"
