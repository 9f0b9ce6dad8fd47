"""A disk that is full, read-only or damaged, and a process without file handles: clear errors, nothing lost, and it
works again when that has passed.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import pytest
from node_world import seal
from small_disk import remount, small_disk
from ssd_world import FAST_DIR, KIB, SMALL, copy_as_is, inventory, is_object, item_of, log_files, parts_of, read_object

from moonpool.base.errors import Corrupt, NoSpace, Unavailable
from moonpool.node.ssd import LogLocation, SsdConfig, SsdLog
from moonpool.node.ssd.folder import on_disk

A, B, C = b"a" * 36, b"b" * 36, b"c" * 36
FILE = SMALL.file_nbytes


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for about five files."""
    with small_disk(tmp_path / "disk", 5 * FILE + 32 * KIB) as folder:
        yield folder


@pytest.fixture
def fast_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ssd-log-", dir=FAST_DIR) as made:
        yield Path(made)


@contextmanager
def limit(which: int, value: int) -> Iterator[None]:
    before = resource.getrlimit(which)
    resource.setrlimit(which, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def fill(log: SsdLog) -> tuple[dict[bytes, int], Exception]:
    stored: dict[bytes, int] = {}
    while True:
        key = b"%036d" % len(stored)
        (result,) = log.append_many([item_of(key, 1)])
        if not isinstance(result, LogLocation):
            return stored, result
        stored[key] = 1


def fill_up(file: FileIO) -> None:
    while True:
        file.write(bytes(16 * KIB))


def take_handles(held: list[int]) -> None:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))


def check_all(log: SsdLog, stored: dict[bytes, int]) -> None:
    assert inventory(log) == stored
    for key, generation in stored.items():
        assert read_object(log, key, generation) == b"".join(parts_of(key, generation))
    log.check_integrity()


def test_a_full_disk(disk: Path) -> None:
    with SsdLog.open(disk / "log", SMALL) as log:
        stored, refused = fill(log)
        assert isinstance(refused, NoSpace)
        assert "No space left on device" in str(refused)
        check_all(log, stored)
        gone = sorted(stored)[: len(stored) // 2]
        assert log.remove([(key, 1) for key in gone]) == len(gone)  # works, written or not
        stored = {key: 1 for key in stored if key not in gone}
        log.compact(1 << 20)
        for file in log.drained():
            log.release(file)
        check_all(log, stored)
        log.append(A, 1, parts_of(A, 1))
        log.sync()
        check_all(log, {**stored, A: 1})


def test_a_disk_that_others_filled(disk: Path) -> None:
    with SsdLog.open(disk / "log", SMALL) as log:
        log.append(A, 1, parts_of(A, 1))
        hog = disk / "hog"
        with hog.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            fill_up(file)
        stored, refused = fill(log)  # the active file has its space
        assert stored
        assert isinstance(refused, NoSpace)
        check_all(log, {A: 1, **stored})
        hog.unlink()
        log.append(B, 1, parts_of(B, 1))
        check_all(log, {A: 1, B: 1, **stored})


def test_no_room_for_a_file_by_the_process_limit(tmp_path: Path) -> None:
    with SsdLog.open(tmp_path, SMALL) as log:
        with limit(resource.RLIMIT_FSIZE, FILE // 2):
            with pytest.raises(NoSpace):
                log.append(A, 1, parts_of(A, 1))
        log.append(A, 1, parts_of(A, 1))
        check_all(log, {A: 1})


def test_tombstones_wait_for_the_disk(tmp_path: Path) -> None:
    """Removed is removed, though nothing can be written; when it can be again, the disk learns it."""
    with SsdLog.open(tmp_path / "log", SMALL) as log:
        log.append_many([item_of(A, 1), item_of(B, 1)])
        seal(log)
        with limit(resource.RLIMIT_FSIZE, 0):
            assert log.remove([(A, 1)]) == 1
            assert inventory(log) == {B: 1}
            with pytest.raises(NoSpace):
                log.sync()
        assert log.stats().num_pending_tombstones == 1
        log.append(C, 1, parts_of(C, 1))
        assert log.stats().num_pending_tombstones == 0
        with SsdLog.open(copy_as_is(tmp_path / "log", tmp_path / "killed"), SMALL) as again:
            assert inventory(again) == {B: 1, C: 1}


def test_a_read_only_disk(disk: Path) -> None:
    with SsdLog.open(disk / "log", SMALL) as log:
        log.append_many([item_of(A, 1), item_of(B, 1)])
    assert remount(disk, "ro")
    try:
        with SsdLog.open(disk / "log", SMALL) as log:
            check_all(log, {A: 1, B: 1})
            with pytest.raises(Unavailable, match="Read-only file system"):
                log.append(C, 1, parts_of(C, 1))
            assert log.remove([(B, 1)]) == 1
            with pytest.raises(Unavailable, match="Read-only"):
                log.sync()
            check_all(log, {A: 1})
            assert remount(disk, "rw")
            log.append(C, 1, parts_of(C, 1))
            log.sync()
            check_all(log, {A: 1, C: 1})
    finally:
        assert remount(disk, "rw")
    with SsdLog.open(disk / "log", SMALL) as log:
        check_all(log, {A: 1, C: 1})


def test_no_handles_left(tmp_path: Path) -> None:
    config = SsdConfig(max_nbytes=8 * FILE, file_nbytes=FILE, max_open_files=2)
    with SsdLog.open(tmp_path, config) as log:
        stored, _ = fill(log)
        assert read_object(log, min(stored), 1)
        held: list[int] = []
        try:
            with limit(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + 8):
                with pytest.raises(OSError, match="Too many open files"):
                    take_handles(held)
                for key in stored:  # one handle is the log's own; it goes from file to file
                    assert read_object(log, key, 1) == b"".join(parts_of(key, 1))
                log._folder._close_oldest()
                held.append(os.open("/dev/null", os.O_RDONLY))
                with pytest.raises(Unavailable, match="Too many open files"):
                    read_object(log, min(stored), 1)
                assert log.remove([(max(stored), 1)]) == 1
                assert log.stats().num_pending_tombstones == 1
        finally:
            for fd in held:
                os.close(fd)
        stored.pop(max(stored))
        log.sync()
        check_all(log, stored)


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.ENOSPC, NoSpace), (errno.EROFS, Unavailable), (errno.EIO, Unavailable), (errno.EMFILE, Unavailable)],
)
def test_errors_of_the_system_are_mapped(number: int, expected: type[Exception]) -> None:
    with pytest.raises(expected, match=f"/some/file: {os.strerror(number)}"), on_disk("/some/file"):
        raise OSError(number, os.strerror(number))


def test_files_that_were_removed_or_cut_short(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    with SsdLog.open(folder, SMALL) as log:
        first = log.append(A, 1, parts_of(A, 1))
        seal(log)
        second = log.append(B, 1, parts_of(B, 1))
        log.append(C, 1, parts_of(C, 1))
        seal(log)
        os.unlink(log.path_of(first.file_number))
        os.truncate(log.path_of(second.file_number), second.offset + 12 * KIB)
        with pytest.raises(Unavailable):
            read_object(log, A, 1)
        with pytest.raises(Unavailable):
            read_object(log, C, 1)
        assert read_object(log, B, 1) == b"".join(parts_of(B, 1))
    with SsdLog.open(folder, SMALL) as log:
        check_all(log, {B: 1})


def test_files_without_a_header_are_given_up(tmp_path: Path) -> None:
    with SsdLog.open(tmp_path, SMALL) as log:
        log.append(A, 1, parts_of(A, 1))
    (tmp_path / "log-0000000007").write_bytes(b"")
    (tmp_path / "log-0000000009").write_bytes(random.Random(1).randbytes(FILE))
    (tmp_path / "spare-0000000004").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not ours")
    with SsdLog.open(tmp_path, SMALL) as log:
        check_all(log, {A: 1})
        assert log.stats().num_unreadable_files == 2
        location = log.append(B, 1, parts_of(B, 1))
        assert location.file_number > 9
    assert (tmp_path / "notes.txt").exists()
    assert not (tmp_path / "spare-0000000004").exists()


def flip_bits(folder: Path, rng: random.Random, count: int) -> None:
    for _ in range(count):
        path = rng.choice(log_files(folder))
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)


def flip_and_read(source: Path, scratch: Path, objects: dict[bytes, int], rng: random.Random) -> tuple[int, int]:
    """(lost, refused). Some flips hit a running log, others one that is down."""
    shutil.copytree(source, scratch)
    lost = refused = 0
    flip_bits(scratch, rng, 3)
    with SsdLog.open(scratch, SMALL) as log:
        flip_bits(scratch, rng, 3)
        for key, generation in objects.items():
            if log.find(key, generation) is None:
                lost += 1
                continue
            try:
                assert is_object(read_object(log, key, generation), parts_of(key, generation))
            except Corrupt:
                refused += 1
        assert log.stats().num_corrupt == refused
        assert lost == 0 or log.stats().num_torn or log.stats().num_unreadable_files or len(log_files(scratch)) < 4
    shutil.rmtree(scratch)
    return lost, refused


@pytest.mark.parametrize("rounds", [90, pytest.param(1200, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_flipped_bits_never_give_wrong_bytes(fast_path: Path, rounds: int) -> None:
    rng = random.Random(4)
    objects = {b"%036d" % number: 1 + number % 3 for number in range(14)}
    with SsdLog.open(fast_path / "log", SMALL) as log:
        log.append_many([item_of(key, generation) for key, generation in objects.items()])
        source = copy_as_is(fast_path / "log", fast_path / "killed")
    outcomes = [
        flip_and_read(rng.choice([source, fast_path / "log"]), fast_path / "scratch", objects, rng)
        for _ in range(rounds)
    ]
    assert sum(refused for _, refused in outcomes) > 0
    assert sum(lost for lost, _ in outcomes) > 0
