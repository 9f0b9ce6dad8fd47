"""Snapshots taken while the state changes: what is replayed is the state, wherever the writing was cut short."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_world import BY_HAND, Image, image_of, put_back, reopened, replayed
from waiting import HANG_S

from moonpool.base.clock import VirtualClock
from moonpool.base.errors import AlreadyExists, Cancelled, Corrupt, InvalidInput, MoonpoolError, NoSpace, Overloaded
from moonpool.master.journal import Journal, JournalConfig, SnapshotWriter, snapshot_due
from moonpool.master.journal.frames import END, HEADER_NBYTES, Control, pack_control


class Table:
    """A state like the master's: it changes at once, and says so in records that are absolute."""

    def __init__(self, directory: Path) -> None:
        self.journal, records = Journal.open(directory, BY_HAND)
        self.rows = rows_of(list(records))

    def set(self, key: int, value: int) -> None:
        self.rows[key] = value
        self.journal.append(b"%d=%d" % (key, value))

    def chunk(self, keys: range) -> bytes:
        return b",".join(b"%d=%d" % (key, self.rows.get(key, 0)) for key in keys)


def rows_of(records: list[bytes]) -> dict[int, int]:
    rows: dict[int, int] = {}
    for record in records:
        for pair in record.split(b","):
            key, _, value = pair.partition(b"=")
            rows[int(key)] = int(value)
    return rows


def nonzero(rows: dict[int, int]) -> dict[int, int]:
    return {key: value for key, value in rows.items() if value}


def snapshot(table: Table) -> SnapshotWriter:
    """Chunk by chunk, with a change to an early and a late row between any two."""
    writer = table.journal.begin_snapshot()
    for first in range(0, 20, 5):
        writer.add(table.chunk(range(first, first + 5)))
        table.set(first % 3, 1000 + first)
        table.set(19 - first % 3, 2000 + first)
    return writer


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {"lock", "epoch"}


async def test_a_snapshot_replaces_what_came_before(tmp_path: Path) -> None:
    table = Table(tmp_path)
    for key in range(20):
        table.set(key, key)
    writer = snapshot(table)
    nbytes = await asyncio.wrap_future(writer.finish_soon())
    table.set(3, 33)
    health = table.journal.health()
    table.journal.close()
    assert names(tmp_path) == {"snapshot-1", "journal-1"}
    assert nbytes == health.snapshot_nbytes == (tmp_path / "snapshot-1").stat().st_size
    assert health.journal_nbytes <= (tmp_path / "journal-1").stat().st_size
    assert rows_of(reopened(tmp_path)) == table.rows


async def test_given_up_it_leaves_the_journals_to_be_replayed(tmp_path: Path) -> None:
    table = Table(tmp_path)
    table.set(1, 1)
    writer = snapshot(table)
    writer.abort()
    with pytest.raises(Cancelled):
        await asyncio.wrap_future(writer.finish_soon())
    assert names(tmp_path) == {"journal-0", "journal-1"}
    assert table.journal.health().durable
    await asyncio.wrap_future(snapshot(table).finish_soon())
    table.journal.close()
    assert names(tmp_path) == {"snapshot-2", "journal-2"}
    assert nonzero(rows_of(reopened(tmp_path))) == table.rows


def test_closing_gives_it_up(tmp_path: Path) -> None:
    table = Table(tmp_path)
    writer = snapshot(table)
    with pytest.raises(AlreadyExists):
        table.journal.begin_snapshot()
    table.journal.close()
    with pytest.raises(Cancelled):
        writer.finish_soon().result()
    assert names(tmp_path) == {"journal-0", "journal-1"}


async def test_a_wait_that_is_cancelled_does_not_cancel_it(tmp_path: Path) -> None:
    table = Table(tmp_path)
    writer = snapshot(table)
    waiting = asyncio.wrap_future(writer.finish_soon())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await asyncio.wrap_future(writer.finish_soon())
    table.journal.close()
    assert "snapshot-1" in names(tmp_path)


def test_a_slow_disk_is_told_by_ready_and_never_by_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    real = os.writev

    def slow(fd: int, parts: Any) -> int:
        let_go.wait()
        return real(fd, parts)

    monkeypatch.setattr(os, "writev", slow)
    journal, _ = Journal.open(tmp_path, JournalConfig(snapshot_queue_nbytes=1000))
    writer = journal.begin_snapshot()
    writer.add(b"x" * 600)
    assert bool(writer.ready)
    writer.add(b"y" * 600)
    assert not writer.ready
    with pytest.raises(Overloaded):
        writer.add(b"z")
    with pytest.raises(InvalidInput):
        writer.add(b"")
    let_go.set()
    writer.finish_soon().result(HANG_S)
    journal.close()


def test_a_crash_anywhere_in_it_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is taken down before every call that changes a name or asks for durability."""
    table = Table(tmp_path / "live")
    for key in range(20):
        table.set(key, key + 1)
    table.journal.sync()
    moments: list[tuple[str, Image]] = []

    def look(call: str) -> None:
        moments.append((call, image_of(tmp_path / "live")))

    for call in ("open", "writev", "fsync", "fdatasync", "rename", "ftruncate", "unlink"):
        _before(monkeypatch, call, partial(look, call))
    writer = snapshot(table)
    table.set(7, 77)
    writer.finish_soon().result(HANG_S)
    snapshot(table).finish_soon().result(HANG_S)
    expected = dict(table.rows)
    final = image_of(tmp_path / "live")
    monkeypatch.undo()
    table.journal.close()

    assert {"writev", "fsync", "rename", "unlink"} <= {call for call, _ in moments}
    for index, (_, image) in enumerate(moments):
        found = replayed(put_back(image, tmp_path / f"at-{index}"))
        assert set(rows_of(found)) == set(range(20))
        assert reopened(tmp_path / f"at-{index}") == found
    last_snapshot = [image for _, image in moments if "snapshot-2" in image]
    for index, image in enumerate([*last_snapshot, final]):
        assert rows_of(replayed(put_back(image, tmp_path / f"end-{index}"))) == expected


def test_it_is_published_only_when_the_journal_beside_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks are of different moments; without the records in between they would not fit together."""
    table = Table(tmp_path)
    writer = snapshot(table)
    unsynced = []
    _before(monkeypatch, "rename", lambda: unsynced.append(table.journal.health().unsynced_nbytes))
    assert table.journal.health().unsynced_nbytes > 0
    writer.finish_soon().result(HANG_S)
    monkeypatch.undo()
    table.journal.close()
    assert unsynced[0] == 0


def _before(monkeypatch: pytest.MonkeyPatch, name: str, look: Callable[[], None]) -> None:
    real, busy = getattr(os, name), threading.local()

    def call(*args: Any, **kwargs: Any) -> Any:
        if not getattr(busy, "now", False):
            busy.now = True
            try:
                look()
            finally:
                busy.now = False
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, call)


@settings(max_examples=25, deadline=None)
@given(script=st.lists(st.sampled_from(["set", "begin", "add", "finish", "abort", "crash"]), max_size=30))
def test_any_course_of_events_keeps_the_state(tmp_path_factory: pytest.TempPathFactory, script: list[str]) -> None:
    directory = tmp_path_factory.mktemp("course") / "0"
    table, writer, added, life = Table(directory), None, 0, 0
    for number, step in enumerate(script):
        if step == "set":
            table.set(number % 20, number)
        elif step == "begin" and writer is None:
            writer, added = table.journal.begin_snapshot(), 0
        elif step == "add" and writer is not None and added < 20:
            writer.add(table.chunk(range(added, added + 4)))
            added += 4
        elif step in ("finish", "abort") and writer is not None:
            if step == "finish" and added == 20:
                writer.finish_soon()
            else:
                writer.abort()
            writer.join()
            writer = None
        elif step == "crash":
            life += 1
            image = image_of(directory)
            table.journal.close()
            directory, rows, writer = put_back(image, directory.with_name(str(life))), table.rows, None
            table = Table(directory)
            assert nonzero(table.rows) == nonzero(rows)
    table.journal.close()
    assert nonzero(rows_of(reopened(directory))) == nonzero(table.rows)


def two_generations(tmp_path: Path) -> tuple[dict[int, int], Image]:
    """A folder as it is between the publishing of a snapshot and the removal of what it replaces."""
    table = Table(tmp_path / "live")
    for key in range(20):
        table.set(key, key + 1)
    old = image_of(tmp_path / "live")
    snapshot(table).finish_soon().result(HANG_S)
    table.set(4, 44)
    image = image_of(tmp_path / "live")
    table.journal.close()
    first = old["journal-0"]
    return table.rows, image | {"journal-0": first + pack_control(Control(END, len(first), 0))}


def test_a_snapshot_that_is_not_whole_is_not_used_while_there_is_another_way(tmp_path: Path) -> None:
    rows, image = two_generations(tmp_path)
    for cut in (1, 40, len(image["snapshot-1"]) - 10):
        broken = image | {"snapshot-1": image["snapshot-1"][:-cut]}
        left = put_back(broken, tmp_path / f"cut-{cut}")
        assert nonzero(rows_of(reopened(left))) == rows
        [aside] = left.glob("aside-*")
        assert (aside / "snapshot-1").exists()
        assert nonzero(rows_of(reopened(left))) == rows


def test_a_snapshot_that_is_not_whole_is_told_when_there_is_no_other_way(tmp_path: Path) -> None:
    _, image = two_generations(tmp_path)
    del image["journal-0"]
    left = put_back(image | {"snapshot-1": image["snapshot-1"][:-1]}, tmp_path / "left")
    with pytest.raises(Corrupt, match=r"journal-0 is missing.*snapshot-1 is not whole.*--forget-journal"):
        Journal.open(left)
    assert (left / "snapshot-1").exists()


@pytest.mark.parametrize("size", [0, 10, HEADER_NBYTES, 60])
def test_a_journal_shorter_than_its_snapshot_knows_is_told(tmp_path: Path, size: int) -> None:
    table = Table(tmp_path / "live")
    table.set(1, 1)
    snapshot(table).finish_soon().result(HANG_S)
    image = image_of(tmp_path / "live")
    table.journal.close()
    image["journal-1"] = image["journal-1"][:size]
    with pytest.raises(Corrupt, match="its snapshot says that it was longer"):
        replayed(put_back(image, tmp_path / "left"))


@pytest.mark.parametrize(
    ("journal_nbytes", "snapshot_nbytes", "durable", "since_failure_s", "due"),
    [
        (100, 0, True, None, False),
        (101, 0, True, None, True),
        (101, 101, True, None, False),
        (102, 101, True, None, True),
        (0, 0, False, None, True),
        (0, 0, False, 9.9, False),
        (102, 0, True, 10.0, True),
    ],
)
def test_when_one_is_due(
    journal_nbytes: int, snapshot_nbytes: int, durable: bool, since_failure_s: float | None, due: bool
) -> None:
    config = JournalConfig(snapshot_min_nbytes=100, snapshot_retry_s=10.0)
    assert due is snapshot_due(
        config,
        journal_nbytes=journal_nbytes,
        snapshot_nbytes=snapshot_nbytes,
        durable=durable,
        since_failure_s=since_failure_s,
    )


def is_due(journal: Journal) -> bool:
    return journal.should_snapshot


def test_one_that_fails_is_cleaned_up_and_tried_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    journal, _ = Journal.open(tmp_path, JournalConfig(snapshot_min_nbytes=10, snapshot_retry_s=5.0), clock)
    journal.append(b"x" * 100)
    assert is_due(journal)

    def full(fd: int, parts: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    writer = journal.begin_snapshot()
    with pytest.raises(NoSpace, match="snapshot-1"):
        writer.finish_soon().result(HANG_S)
    with pytest.raises(MoonpoolError):
        writer.add(b"more")
    assert names(tmp_path) == {"journal-0", "journal-1"}
    assert not is_due(journal)
    clock.advance(5.0)
    assert is_due(journal)
    monkeypatch.undo()
    journal.begin_snapshot().finish_soon().result(HANG_S)
    assert not is_due(journal)
    journal.close()


def fail_once(journal: Journal) -> None:
    with pytest.raises(NoSpace):
        journal.begin_snapshot().finish_soon().result(HANG_S)


def no_space(fd: int, parts: Any) -> int:
    raise OSError(28, "No space left on device")


def reopened_copy(directory: Path) -> list[bytes]:
    """What a master would be given if this one died now."""
    return replayed(put_back(image_of(directory), directory.with_name(f"copy{next(_COPIES)}")))


_COPIES = itertools.count()


def test_snapshots_that_fail_leave_no_file_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "master"
    journal, _ = Journal.open(folder, BY_HAND)
    journal.append(b"first")
    monkeypatch.setattr(os, "writev", no_space)
    for _ in range(3):
        fail_once(journal)
    assert names(folder) == {"journal-0", "journal-1"}, "nothing was added meanwhile"
    journal.append(b"second")
    fail_once(journal)
    assert names(folder) == {"journal-0", "journal-1", "journal-2"}
    assert reopened_copy(folder) == [b"first", b"second"]
    journal.close()


def test_snapshots_that_fail_while_records_are_lacking_leave_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing that is appended meanwhile is acknowledged."""
    folder = tmp_path / "master"
    journal, _ = Journal.open(folder, BY_HAND)
    journal.append(b"first")

    def broken(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        with pytest.raises(MoonpoolError):
            journal.sync()
        journal.append(b"second")
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", no_space)
        for number in range(3):
            fail_once(journal)
            with pytest.raises(MoonpoolError, match="nothing can be added before the next snapshot"):
                journal.append(b"refused %d" % number)
    assert names(folder) == {"journal-0", "journal-1"}
    assert reopened_copy(folder) == [b"first", b"second"]
    writer = journal.begin_snapshot()
    with pytest.raises(MoonpoolError, match="nothing can be added before the next snapshot"):
        journal.append(b"counts with the snapshot")
    assert reopened_copy(folder) == [b"first", b"second"]
    writer.add(b"the state")
    writer.finish_soon().result(HANG_S)
    journal.append(b"third")
    assert reopened_copy(folder) == [b"the state", b"counts with the snapshot", b"third"]
    journal.close()


@pytest.mark.parametrize(("num_failures", "pause_s"), [(1, 10.0), (2, 20.0), (5, 160.0), (20, 600.0)])
def test_the_pause_grows_with_the_files_that_failures_leave(num_failures: int, pause_s: float) -> None:
    config = JournalConfig(snapshot_min_nbytes=100, snapshot_retry_s=10.0)

    def due(since_s: float, durable: bool) -> bool:
        return snapshot_due(
            config,
            journal_nbytes=200,
            snapshot_nbytes=0,
            durable=durable,
            since_failure_s=since_s,
            num_failures=num_failures,
        )

    assert (due(pause_s - 0.1, True), due(pause_s, True)) == (False, True)
    assert due(10.0, False), "a journal that lacks records leaves no file"
