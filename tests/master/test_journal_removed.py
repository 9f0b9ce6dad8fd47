"""The master's folder is removed while the master runs: it says that nothing is durable, until the folder is there
again and has everything."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from facade_pool import FacadePool, facade_pool
from journal_world import BY_HAND, reopened, replayed
from waiting import HANG_S, wait_until

from moonpool.base.clock import VirtualClock
from moonpool.base.errors import ConfigError, Unavailable
from moonpool.cli.stat import command as stat
from moonpool.master.journal import Journal
from moonpool.master.journal.journal import LOOK_S


class RemovedJournal:
    """A journal of one record that was on disk when its folder was removed, or moved away."""

    def __init__(self, folder: Path, *, moved: bool = False) -> None:
        self.folder, self.clock = folder, VirtualClock()
        self.journal, _ = Journal.open(folder, BY_HAND, self.clock)
        self.journal.append(b"before")
        self.journal.sync()
        if moved:
            folder.rename(folder.with_name("elsewhere"))
        else:
            shutil.rmtree(folder)

    def look(self) -> None:
        self.clock.advance(LOOK_S)
        self.journal.look_for_file()

    def write_snapshot(self, *chunks: bytes) -> None:
        writer = self.journal.begin_snapshot()
        for chunk in chunks:
            writer.add(chunk)
        writer.finish_soon().result(HANG_S)


@pytest.fixture(params=["removed", "moved"])
def removed(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RemovedJournal]:
    made = RemovedJournal(tmp_path / "data", moved=request.param == "moved")
    yield made
    made.journal.close()


def test_it_is_told_once(removed: RemovedJournal, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        removed.look()
    health = removed.journal.health()
    assert not health.durable
    wanted = f"the journal in {removed.folder} cannot be written: it was removed or moved away; make the folder again"
    assert health.error is not None
    assert health.error.startswith(wanted)
    assert [wanted in message for message in caplog.messages] == [True]
    assert not removed.folder.exists(), "its place may be that of a disk that is not mounted now"


def test_it_is_looked_for_once_a_second(removed: RemovedJournal) -> None:
    removed.journal.look_for_file()
    assert removed.journal.health().durable
    removed.look()
    assert not removed.journal.health().durable


def test_a_snapshot_fails_and_is_tried_again_after_a_while(removed: RemovedJournal) -> None:
    removed.look()
    is_due = [removed.journal.should_snapshot]
    with pytest.raises(Unavailable, match="cannot begin a journal"):
        removed.journal.begin_snapshot()
    is_due.append(removed.journal.should_snapshot)
    removed.journal.append(b"puts go on")
    removed.clock.advance(BY_HAND.snapshot_retry_s)
    is_due.append(removed.journal.should_snapshot)
    assert is_due == [True, False, True]


def test_all_is_durable_again_once_the_folder_is_there(removed: RemovedJournal) -> None:
    removed.look()
    removed.journal.append(b"meanwhile")
    removed.folder.mkdir()
    removed.clock.advance(BY_HAND.snapshot_retry_s)
    removed.journal.retry_unwritten()  # the epoch, without which the next master would refuse to start
    assert not removed.journal.health().durable, "the folder has no records yet"
    removed.write_snapshot(b"everything")
    removed.look()
    assert (removed.journal.health().durable, removed.journal.health().error) == (True, None)
    removed.journal.append(b"and on")
    with pytest.raises(ConfigError, match="another master"):
        Journal.open(removed.folder, BY_HAND)
    assert replayed(removed.folder) == [b"everything", b"and on"]
    epoch = removed.journal.epoch
    removed.journal.close()
    journal, records = Journal.open(removed.folder, BY_HAND)
    assert list(records) == [b"everything", b"and on"]
    assert journal.epoch > epoch
    journal.close()


def test_a_folder_that_another_master_has_made_stays_its_own(removed: RemovedJournal) -> None:
    removed.look()
    other, _ = Journal.open(removed.folder, BY_HAND)
    other.append(b"of the other")
    epoch = (removed.folder / "epoch").read_text()
    removed.clock.advance(BY_HAND.snapshot_retry_s)
    removed.journal.retry_unwritten()
    with pytest.raises(ConfigError, match="another master"):
        removed.journal.begin_snapshot()
    assert not removed.journal.should_snapshot, "it is tried again after a while"
    assert not removed.journal.health().durable
    assert (removed.folder / "epoch").read_text() == epoch
    other.close()
    assert reopened(removed.folder) == [b"of the other"]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FacadePool]:
    yield from facade_pool(tmp_path)


def test_stat_says_that_nothing_is_durable(pool: FacadePool, capsys: pytest.CaptureFixture[str]) -> None:
    """Reads and puts go on. When the folder is there again, the master writes everything to it."""
    store, folder = pool.store(), Path(pool.master.config.data_dir)
    store.put("k", b"1")
    shutil.rmtree(folder)
    wait_until(lambda: store.stats().journal_error, "the master has noticed")
    stat(master=pool.address)
    why = f"the journal in {folder} cannot be written: it was removed or moved away"
    assert f"NOT DURABLE, a restarted master may miss objects ({why}; " in capsys.readouterr().out
    store.put("l", b"2")
    assert (store.get("k"), store.get("l")) == (b"1", b"2")
