"""Places that a power failure of the master may undo: no reader remembers them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from state_pool import Pool
from waiting import wait_until

from moonpool.master.journal.journal import Journal, JournalConfig
from moonpool.master.journal.sync_thread import SyncThread, least_pause_s
from moonpool.master.state import unsynced
from moonpool.master.state.unsynced import UnsyncedKeys
from moonpool.store.messages import PutOptions


class Disk:
    """Has as many entries as the test says."""

    def __init__(self, pool: Pool) -> None:
        self.keys = pool.state.outcomes.unsynced
        self.num_synced = 1
        self.keys.num_synced = lambda: self.num_synced
        self.num_asked = 0  # how often it was asked to sync soon
        self.keys.sync_soon = self._ask

    def _ask(self) -> None:
        self.num_asked += 1

    def sync(self) -> None:
        self.num_synced = self.keys.num_entries


@pytest.fixture
def pool() -> Pool:
    return Pool("a", "b", lease_s=10.0)


@pytest.fixture
def disk(pool: Pool) -> Disk:
    return Disk(pool)


def remembered_s(pool: Pool, key: bytes = b"k") -> float:
    (info,) = pool.state.lookup([key], pool.now_s)
    assert info is not None
    return info.remember_s


def test_a_new_object_is_remembered_when_the_disk_has_it(pool: Pool, disk: Disk) -> None:
    pool.put(b"k")
    assert remembered_s(pool) == 0.0
    disk.sync()
    assert remembered_s(pool) == 10.0
    pool.put(b"other")
    assert (remembered_s(pool), remembered_s(pool, b"other")) == (10.0, 0.0)


def test_a_batch_of_new_objects(pool: Pool, disk: Disk) -> None:
    keys = [b"%d" % number for number in range(20)]
    reply = pool.state.put_start(keys, [10] * 20, PutOptions(), pool.now_s)
    pool.state.put_end(keys, reply.generations, {}, pool.now_s)
    pool.check()
    assert {remembered_s(pool, key) for key in keys} == {0.0}
    disk.sync()
    assert {remembered_s(pool, key) for key in keys} == {10.0}


def test_who_looks_up_what_is_not_on_the_disk_asks_for_a_sync(
    pool: Pool, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.put(b"k")
    disk.sync()
    pool.put(b"other")
    assert remembered_s(pool) == 10.0
    assert disk.num_asked == 0
    pool.state.lookup([b"k", b"other"], pool.now_s)
    assert disk.num_asked == 1
    disk.sync()
    assert remembered_s(pool, b"other") == 10.0
    assert disk.num_asked == 1
    monkeypatch.setattr(unsynced, "_MAX_KEYS", 0)  # so all keys count as not on disk
    pool.put(b"third")
    assert remembered_s(pool) == 0.0
    assert disk.num_asked == 2


def test_a_new_value_is_remembered_when_the_disk_has_it(pool: Pool, disk: Disk) -> None:
    pool.put(b"k")
    disk.sync()
    pool.put(b"k", replace=True)
    assert remembered_s(pool) == 0.0
    disk.sync()
    assert remembered_s(pool) == 10.0


def test_a_new_replica_is_not_remembered_before_the_disk_has_it(pool: Pool, disk: Disk) -> None:
    pool.put(b"k", preferred=("a.dram",))
    disk.sync()
    pool.state.copy(b"k", ["b.dram"], pool.now_s)
    pool.carry_out("a", "b")
    (info,) = pool.state.lookup([b"k"], pool.now_s)
    assert info is not None
    assert (len(info.replicas), info.remember_s) == (2, 0.0)
    generation = info.replicas[1].generation
    assert pool.state.renew_leases([b"k"], [generation], pool.now_s, (2,)).is_there == [False]
    disk.sync()
    assert remembered_s(pool) == 10.0
    assert pool.state.renew_leases([b"k"], [generation], pool.now_s, (2,)).is_there == [True]


def test_a_restarted_master_lets_nothing_be_remembered_before_its_journal_is_on_disk(pool: Pool) -> None:
    pool.put(b"k")
    pool.restart()
    disk = Disk(pool)
    disk.num_synced = 0
    assert remembered_s(pool) == 0.0
    disk.num_synced = 1
    assert remembered_s(pool) == 10.0


def is_empty(entries: UnsyncedKeys) -> bool:
    """Whether it takes no memory."""
    return not entries.keys and not entries._by_entry


def test_keys_are_forgotten_when_they_are_synced() -> None:
    entries, num_synced = UnsyncedKeys(), 1
    entries.num_synced = lambda: num_synced
    for number in range(10):
        entries.add([b"%d" % number, b"always"])
        entries.num_entries += 1
    assert entries.update()
    assert b"0" in entries.keys
    assert b"never" not in entries.keys
    num_synced = 10
    assert entries.update()
    assert b"8" not in entries.keys
    assert b"9" in entries.keys
    assert b"always" in entries.keys
    num_synced = 11
    assert entries.update()
    assert b"always" not in entries.keys
    assert is_empty(entries)


def test_a_disk_that_does_not_answer_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsynced, "_MAX_KEYS", 100)
    entries, num_synced = UnsyncedKeys(), 1
    entries.num_synced = lambda: num_synced
    for number in range(101):
        entries.add([b"%d" % number])
        entries.num_entries += 1
    assert is_empty(entries)
    num_synced = entries.num_entries - 1
    assert not entries.update(), "no key may be remembered"
    num_synced = entries.num_entries
    assert entries.update()
    assert b"100" not in entries.keys


def open_journal(tmp_path: Path, sync_s: float) -> Journal:
    return Journal.open(tmp_path, JournalConfig(sync_s=sync_s))[0]


def test_the_journal_counts_what_is_on_disk(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, sync_s=3600.0)
    assert journal.num_synced == 0, "what it found may not be there after a power failure"
    journal.append([b"one", b"two"])
    assert journal.num_synced == 0
    journal.sync()
    assert journal.num_synced == 2
    journal.append(b"three")
    journal.append(b"four")
    assert journal.num_synced == 2
    journal.sync()
    journal.sync()
    assert journal.num_synced == 4
    journal.close()


def is_synced_up_to(journal: Journal, entry: int) -> bool:
    return journal.num_synced >= entry


def lose(journal: Journal) -> None:
    """As if a write had failed."""
    journal._lost(OSError(5, "Input/output error"))


def test_the_journal_is_synced_soon_when_a_reader_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = open_journal(tmp_path, sync_s=3600.0)
    for number in range(3):
        journal.append(b"one")
        journal.sync_soon()
        wait_until(partial(is_synced_up_to, journal, number + 2), "it is synced")
    lose(journal)
    journal.append(b"two")
    hurried: list[SyncThread] = []
    monkeypatch.setattr(SyncThread, "hurry", hurried.append)
    journal.sync_soon()
    assert not hurried, "after a loss a sync proves nothing"
    journal.close()


@pytest.mark.parametrize(
    ("took_s", "sync_s", "pause_s"),
    [(0.0, 0.1, 0.01), (0.001, 0.1, 0.01), (0.02, 0.1, 0.08), (3.0, 0.1, 0.1), (1.0, 0, 0)],
)
def test_a_slow_disk_is_not_hurried(took_s: float, sync_s: float, pause_s: float) -> None:
    assert least_pause_s(took_s, sync_s) == pytest.approx(pause_s)


def test_what_a_master_finds_is_synced_though_nothing_is_appended(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, sync_s=0.001)
    journal.append(b"one")
    journal.close()
    again = open_journal(tmp_path, sync_s=0.001)
    wait_until(lambda: is_synced_up_to(again, 1), "it is synced")
    assert again.num_synced == 1
    again.close()


def test_records_behind_a_lost_one_are_not_on_disk(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, sync_s=3600.0)
    journal.sync()
    lose(journal)
    journal.append(b"one")
    journal.sync()
    assert journal.num_synced == 1
    journal.close()
