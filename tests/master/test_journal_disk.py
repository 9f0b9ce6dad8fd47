"""Disks that are full, read-only or broken: clear errors while it lasts, and afterwards a journal that is whole."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from journal_world import BY_HAND, reopened, replayed
from small_disk import remount, small_disk
from waiting import HANG_S

from moonpool.base.clock import VirtualClock
from moonpool.base.errors import ConfigError, MoonpoolError, NoSpace, Unavailable
from moonpool.master.journal import Journal, JournalConfig, describe
from moonpool.master.journal.folder import JournalFolder


def fill(journal: Journal, record: bytes) -> tuple[int, MoonpoolError]:
    for count in range(10_000):
        try:
            journal.append(record)
        except MoonpoolError as error:
            return count, error
    raise AssertionError("the disk never filled up")


def heal(journal: Journal, *chunks: bytes) -> None:
    writer = journal.begin_snapshot()
    for chunk in chunks:
        writer.add(chunk)
    writer.finish_soon().result(HANG_S)


def is_due(journal: Journal) -> bool:
    return journal.should_snapshot


def test_a_full_disk_is_told_and_survived(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(500_000))
        clock = VirtualClock()
        journal, _ = Journal.open(disk / "data", BY_HAND, clock)
        count, error = fill(journal, b"r" * 10_000)
        assert isinstance(error, NoSpace)
        assert "cannot be written: No space left on device" in str(error)
        assert not journal.health().durable
        assert not is_due(journal), "a snapshot needs far more room than what is to be written"
        clock.advance(BY_HAND.snapshot_retry_s)
        assert is_due(journal), "this file may never take it"
        with pytest.raises(NoSpace):
            journal.append(b"r" * 10_000)
        report = describe(disk / "data")
        assert report.last_error is not None
        assert "No space" in report.last_error

        ballast.unlink()
        journal.append(b"there is room again")
        assert journal.health().durable, "what was refused is written before it"
        assert journal.health().error is None
        assert not is_due(journal)
        assert replayed(disk / "data") == [b"r" * 10_000] * (count + 2) + [b"there is room again"]
        heal(journal, b"everything")
        assert journal.health().durable
        assert journal.health().error is None
        journal.append(b"and on")
        journal.close()
        assert count > 10
        assert reopened(disk / "data") == [b"everything", b"and on"]


def test_what_was_written_before_the_disk_was_full_is_replayed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 300 << 10) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(50_000))
        journal, _ = Journal.open(disk / "data", BY_HAND)
        count, _ = fill(journal, b"r" * 7001)
        ballast.unlink()
        journal.append(b"later")
        journal.close()
        assert reopened(disk / "data") == [b"r" * 7001] * (count + 1) + [b"later"], "what failed is written first"


def test_what_was_not_written_is_written_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 300 << 10) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(50_000))
        journal, _ = Journal.open(disk / "data", BY_HAND)
        count, _ = fill(journal, b"r" * 7001)
        assert bool(journal.has_unwritten)
        with pytest.raises(NoSpace):
            journal.retry_unwritten()
        ballast.unlink()
        journal.retry_unwritten()
        assert not journal.has_unwritten
        journal.retry_unwritten()
        journal.close()
        assert reopened(disk / "data") == [b"r" * 7001] * (count + 1)


def test_a_snapshot_replaces_what_was_not_written(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 300 << 10) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(50_000))
        journal, _ = Journal.open(disk / "data", BY_HAND)
        fill(journal, b"r" * 7001)
        ballast.unlink()
        heal(journal, b"everything")
        assert not journal.has_unwritten
        journal.append(b"and on")
        journal.close()
        assert reopened(disk / "data") == [b"everything", b"and on"]


def test_no_more_is_remembered_than_memory_should_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.master.journal.journal.MAX_UNWRITTEN_NBYTES", 20_000)
    with small_disk(tmp_path / "disk", 300 << 10) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(50_000))
        journal, _ = Journal.open(disk / "data", BY_HAND)
        count, _ = fill(journal, b"r" * 7001)
        for _ in range(2):
            with pytest.raises(NoSpace):
                journal.append(b"s" * 7001)
        ballast.unlink()
        with pytest.raises(Unavailable, match="snapshot"):
            journal.append(b"a hole would be before it")
        heal(journal, b"everything")
        journal.append(b"and on")
        journal.close()
        assert count
        assert reopened(disk / "data") == [b"everything", b"and on"]


def test_a_snapshot_that_does_not_fit_costs_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        journal, _ = Journal.open(disk / "data", BY_HAND)
        journal.append(b"kept")
        with pytest.raises(NoSpace, match=r"snapshot-1\.new"):
            heal(journal, bytes(700_000), bytes(700_000))
        journal.append(b"and this")
        assert journal.health().durable
        journal.close()
        assert reopened(disk / "data") == [b"kept", b"and this"]


@pytest.mark.parametrize("closed", [False, True])
def test_a_full_disk_keeps_no_master_from_starting(tmp_path: Path, closed: bool) -> None:
    """Again and again; what is appended then is refused and kept, and written when there is room."""
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        first, _ = Journal.open(disk / "data", BY_HAND)
        first.append(b"known")
        if closed:  # the next life begins a new file
            heal(first, b"known")
        first.close()
        ballast = disk / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        epochs = [first.epoch]
        for _ in range(3):
            journal, records = Journal.open(disk / "data", BY_HAND)
            epochs.append(journal.epoch)
            assert list(records) == [b"known"]
            _, error = fill(journal, b"r" * 5000)
            assert isinstance(error, NoSpace)
            assert not journal.health().durable
            journal.close()
        assert epochs == sorted(set(epochs))
        journal, records = Journal.open(disk / "data", BY_HAND)
        assert list(records) == [b"known"]
        with pytest.raises(NoSpace):
            journal.append(b"r" * 5000)
        ballast.unlink()
        journal.append(b"and this")
        heal(journal, b"known", b"all of it")
        assert journal.health().durable
        journal.close()
        assert reopened(disk / "data") == [b"known", b"all of it"]


def test_files_are_set_aside_on_a_disk_that_takes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_folder(path: Path, mode: int = 0o777) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "journal-3").write_bytes(b"x")
    monkeypatch.setattr(os, "mkdir", no_folder)
    aside = JournalFolder(tmp_path).set_aside([tmp_path / "journal-3"])
    assert [path.name for path in tmp_path.iterdir()] == [f"{aside.name}-journal-3"]
    assert JournalFolder(tmp_path).listing().empty


def test_a_read_only_disk_is_told_at_the_start(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        assert remount(disk, "ro")
        with pytest.raises(ConfigError, match="Read-only file system"):
            Journal.open(disk / "data")


FILE_SIZE_LIMIT = """
import resource, sys
from pathlib import Path
from moonpool.base.errors import NoSpace
from moonpool.master.journal import Journal
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
journal, _ = Journal.open(Path(sys.argv[1]))
count = 0
try:
    while True:
        journal.append(b"r" * 7001)
        count += 1
except NoSpace as error:
    assert "too large" in str(error), error
writer = journal.begin_snapshot()
writer.add(b"s" * 7001)
writer.finish_soon().result(timeout=10)
journal.append(b"on")
assert journal.health().durable and count == 7, count
journal.close()
"""


def test_a_file_that_may_not_grow_is_followed_by_another(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FILE_SIZE_LIMIT, tmp_path / "data"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert reopened(tmp_path / "data") == [b"s" * 7001, b"on"]


def broken(number: int) -> Any:
    def call(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    return call


def test_a_sync_that_fails_is_made_up_for_by_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = Journal.open(tmp_path, BY_HAND)
    journal.append(b"one")
    monkeypatch.setattr(os, "fdatasync", broken(errno.EIO))
    with pytest.raises(Unavailable, match="Input/output error"):
        journal.sync()
    monkeypatch.undo()
    size = (tmp_path / "journal-0").stat().st_size
    journal.sync()  # succeeds, and proves nothing: no mark may speak for those bytes
    assert (tmp_path / "journal-0").stat().st_size == size
    assert not journal.health().durable
    heal(journal, b"one")
    assert journal.health().durable
    journal.append(b"two")
    journal.sync()
    assert journal.health().unsynced_nbytes == 0
    journal.close()
    assert reopened(tmp_path) == [b"one", b"two"]


def test_records_lost_while_a_snapshot_is_written_spoil_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = Journal.open(tmp_path, BY_HAND)
    writer = journal.begin_snapshot()
    monkeypatch.setattr(os, "write", broken(errno.EIO))
    with pytest.raises(Unavailable):
        journal.append(b"lost")
    monkeypatch.undo()
    with pytest.raises(Unavailable, match="records were lost while snapshot-1 was written"):
        writer.finish_soon().result(HANG_S)
    heal(journal, b"all")
    assert journal.health().durable
    journal.close()
    assert reopened(tmp_path) == [b"all"]


def test_half_a_record_that_cannot_be_cut_off_yet_is_cut_off_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = Journal.open(tmp_path, BY_HAND)
    journal.append(b"whole")
    real = os.write

    def half(fd: int, data: bytes) -> int:
        real(fd, data[: len(data) // 2])
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", half)
    monkeypatch.setattr(os, "ftruncate", broken(errno.EROFS))
    with pytest.raises(Unavailable, match="Input/output error"):
        journal.append(b"written in half")
    monkeypatch.setattr(os, "write", real)
    with pytest.raises(Unavailable, match="Read-only"):
        journal.append(b"not written, for it would follow half a record")
    monkeypatch.undo()
    journal.append(b"good again")
    journal.close()
    later = [b"written in half", b"not written, for it would follow half a record"]
    assert reopened(tmp_path) == [b"whole", *later, b"good again"]


def test_with_no_delay_a_record_is_on_disk_before_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, _ = Journal.open(tmp_path, JournalConfig(sync_s=0))
    journal.append(b"one")
    assert journal.health().unsynced_nbytes == 0
    monkeypatch.setattr(os, "fdatasync", broken(errno.EIO))
    with pytest.raises(Unavailable):
        journal.append(b"two")
    monkeypatch.undo()
    journal.close()


def test_the_background_syncs_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, real = threading.Event(), os.fdatasync

    def sync(fd: int) -> None:
        real(fd)
        synced.set()

    journal, _ = Journal.open(tmp_path, JournalConfig(sync_s=0.01))
    monkeypatch.setattr(os, "fdatasync", sync)
    for _ in range(2):
        journal.append(b"record")
        assert synced.wait(HANG_S)
        synced.clear()
    journal.close()
    journal.close()
    with pytest.raises(Unavailable, match="closed"):
        journal.append(b"late")
    with pytest.raises(Unavailable, match="closed"):
        journal.begin_snapshot()
