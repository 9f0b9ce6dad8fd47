"""Masters that die by kill -9, and two that want the same folder."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from journal_world import image_of, put_back, replayed
from severe import LostObject
from waiting import HANG_S

from moonpool.base.clock import VirtualClock
from moonpool.base.errors import ConfigError
from moonpool.master.journal import Journal, describe, forget
from moonpool.master.journal import folder as folder_module
from moonpool.master.journal import journal as journal_module
from moonpool.master.journal.folder import CLOCK_STARTS_S, JournalFolder, WallClock, next_epoch

WRITER = Path(__file__).with_name("journal_writer.py")


@contextmanager
def writer(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, WRITER, directory], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready")
        yield process
    finally:
        process.kill()
        process.communicate()


def last_said(output: bytes, before: int) -> int:
    whole = output[: output.rfind(b"\n") + 1].split()
    return int(whole[-1]) if whole else before


def test_kill_minus_nine_loses_nothing_that_was_appended(tmp_path: Path) -> None:
    """Ten lives on one folder, each killed after some appends; snapshots and their removals go on meanwhile. On a slow
    disk lives go on, longer and longer, until one snapshot has replaced another."""
    rng, said, numbers_of_snapshots, life = random.Random(4), -1, set[int](), 0
    while life < 10 or len(numbers_of_snapshots) < 2:
        life += 1
        with writer(tmp_path / "data") as process:
            assert process.stdout is not None
            output = b"".join(process.stdout.readline() for _ in range(rng.randrange(1, 20 * max(life, 10))))
            process.kill()
            process.wait()
            output += process.stdout.read()
        said = last_said(output, said)
        records = replayed(tmp_path / "data")
        numbers = [int(record[:12]) for record in records if b"up to here" not in record]
        snapshots = [int(record[:12]) for record in records if b"up to here" in record]
        numbers_of_snapshots.update(snapshots)
        is_whole = numbers == list(range(snapshots[-1] + 1 if snapshots else 0, numbers[-1] + 1))
        if not is_whole or said > numbers[-1]:
            raise LostObject(f"{said} was the last to be appended; there are {snapshots} and {numbers}")


def test_two_masters_do_not_share_a_folder(tmp_path: Path) -> None:
    with writer(tmp_path / "data") as process:
        with pytest.raises(ConfigError, match=rf"another master \(pid {process.pid}\) is using"):
            Journal.open(tmp_path / "data")
        with pytest.raises(ConfigError, match="another master"):
            forget(tmp_path / "data")
        report = describe(tmp_path / "data", check=True)
        assert (report.pid, report.problem) == (process.pid, None)
    journal, _ = Journal.open(tmp_path / "data")  # the kernel let go of the dead one's lock
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        Journal.open(tmp_path / "data")
    journal.close()
    assert describe(tmp_path / "data").pid is None


def test_epochs_grow_with_every_life(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        journal, _ = Journal.open(tmp_path)
        epochs.append(journal.epoch)
        assert describe(tmp_path).epoch == journal.epoch  # on disk before anybody can ask
        journal.close()
    assert epochs == sorted(set(epochs))
    forget(tmp_path)
    journal, _ = Journal.open(tmp_path)
    journal.close()
    assert journal.epoch > epochs[-1]


class Wall:
    """A wall clock that passes when it is waited for."""

    def __init__(self, seconds: float) -> None:
        self.unix_s = CLOCK_STARTS_S + seconds
        self.clock = WallClock(lambda: self.unix_s, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.unix_s += seconds


def no_space(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_epoch_is_the_next_one_or_the_clocks(tmp_path: Path) -> None:
    folder, wall = JournalFolder(tmp_path), Wall(1000.5)
    lives = [next_epoch(folder, has_journals=bool(life), clock=wall.clock) for life in range(3)]
    assert lives == [(1000, None), (1001, None), (1002, None)]
    wall.unix_s -= 900
    assert next_epoch(folder, has_journals=True, clock=wall.clock) == (1003, None)
    wall.unix_s += 5000
    assert next_epoch(folder, has_journals=True, clock=wall.clock).number == 5100
    for senseless in (-5.0, 2.0**40):
        assert next_epoch(JournalFolder(tmp_path), has_journals=True, clock=Wall(senseless).clock).number <= 5102


def test_an_epoch_that_cannot_be_kept_never_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lives that leave nothing on disk, in the same second, with and without lives between that do."""
    folder, wall = JournalFolder(tmp_path), Wall(1000.25)
    seen = []
    for life, is_kept in enumerate([True, False, False, True, True, False, True]):
        with monkeypatch.context() as patch:
            if not is_kept:
                patch.setattr(folder_module, "write_epoch", no_space)
            given = next_epoch(folder, has_journals=life > 0, clock=wall.clock)
        assert (given.write_error is None) == is_kept
        seen.append(given.number)
    assert seen == sorted(set(seen))
    assert wall.unix_s - CLOCK_STARTS_S < 1010


def test_an_epoch_is_refused_when_neither_disk_nor_clock_can_give_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_epoch(JournalFolder(tmp_path), has_journals=False, clock=Wall(1000.0).clock)
    monkeypatch.setattr(folder_module, "write_epoch", no_space)
    with pytest.raises(ConfigError, match="make room on the disk or set the clock"):
        next_epoch(JournalFolder(tmp_path), has_journals=True, clock=Wall(500.0).clock)


def test_an_epoch_that_could_not_be_kept_is_kept_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, _ = Journal.open(tmp_path)
    before.append(b"known")
    before.close()
    clock = VirtualClock()
    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "write_epoch", no_space)
        patch.setattr(journal_module, "write_epoch", no_space)
        journal, records = Journal.open(tmp_path, clock=clock)
        assert list(records) == [b"known"]
        assert journal.epoch > before.epoch
        health = journal.health()
        assert not health.durable
        assert "taken from the clock" in (health.error or "")
        assert not journal.should_snapshot  # it would not help
        for _ in range(5):
            clock.advance(2.0)
            journal.retry_unwritten()
        assert len([record for record in caplog.records if "epoch" in record.message]) == 1
    assert describe(tmp_path).epoch == before.epoch
    journal.retry_unwritten()  # not at every tick
    assert bool(journal.has_unwritten)
    clock.advance(2.0)
    journal.retry_unwritten()
    assert not journal.has_unwritten
    assert journal.health().durable
    assert describe(tmp_path).epoch == journal.epoch
    journal.close()


@pytest.mark.parametrize("content", [None, "", "x", "-1", "4294967295"])
def test_an_epoch_that_is_lost_is_not_begun_anew(tmp_path: Path, content: str | None) -> None:
    journal, _ = Journal.open(tmp_path)
    journal.close()
    (tmp_path / "epoch").unlink()
    if content is not None:
        (tmp_path / "epoch").write_text(content)
    before = image_of(tmp_path)
    with pytest.raises(ConfigError, match="epoch"):
        Journal.open(tmp_path)
    assert {name: each for name, each in image_of(tmp_path).items() if name != "lock"} == {
        name: each for name, each in before.items() if name != "lock"
    }


def test_forgetting_sets_aside_and_deletes_nothing(tmp_path: Path) -> None:
    assert forget(put_back({}, tmp_path / "empty")) is None
    journal, _ = Journal.open(tmp_path / "data")
    journal.append(b"something")
    journal.begin_snapshot().finish_soon().result(HANG_S)
    journal.append(b"more")
    journal.close()
    before = image_of(tmp_path / "data")
    aside = forget(tmp_path / "data")
    assert aside is not None
    assert image_of(aside) == {name: before[name] for name in ("journal-1", "snapshot-1")}
    assert replayed(tmp_path / "data") == []
    assert describe(tmp_path / "data").set_aside == [aside.name]


def test_a_folder_is_described(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        describe(tmp_path / "nowhere")
    journal, _ = Journal.open(tmp_path)
    journal.append(b"x" * 100)
    journal.sync()
    journal.append(b"y" * 100)
    journal.begin_snapshot().finish_soon().result(HANG_S)
    journal.close()
    report = describe(tmp_path, check=True)
    assert [file.name for file in report.files] == ["snapshot-1", "journal-1"]
    assert all(file.nbytes > 0 and file.age_s < 60 for file in report.files)
    assert (report.epoch, report.pid, report.last_error, report.problem) == (journal.epoch, None, None, None)
    (tmp_path / "journal-1").rename(tmp_path / "journal-2")
    problem = describe(tmp_path, check=True).problem
    assert problem is not None
    assert "journal-1 is missing" in problem
