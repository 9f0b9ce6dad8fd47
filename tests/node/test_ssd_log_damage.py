"""A batch header that is damaged: its objects are found by their own headers, and count when the master knows them."""

from __future__ import annotations

from pathlib import Path

import pytest
from ssd_world import BLOCK_NBYTES, KIB, copy_as_is, inventory, is_object, item_of, log_files, parts_of, read_object

from moonpool.base.checksum import ChecksumKind
from moonpool.node.ssd import LogItem, SsdConfig, SsdLog
from moonpool.node.ssd.layout import BATCH_MAGIC
from moonpool.store.messages import Doubt

CONFIG = SsdConfig(max_nbytes=8 * 1024 * KIB, file_nbytes=1024 * KIB, batch_nbytes=256 * KIB)


def keys(start: int, count: int) -> list[bytes]:
    return [b"key-%d" % number for number in range(start, start + count)]


def killed(tmp_path: Path, *batches: list[LogItem], removed: tuple[bytes, ...] = ()) -> Path:
    """A folder with these batches, as a killed process leaves it. Tombstones go with the second batch."""
    with SsdLog.open(tmp_path / "live", CONFIG) as log:
        for number, items in enumerate(batches):
            if number == 1:
                log.remove([(key, 1) for key in removed])
            assert not [each for each in log.append_many(items) if isinstance(each, Exception)]
        log.sync()
        return copy_as_is(tmp_path / "live", tmp_path / "left")


def headers(path: Path) -> list[int]:
    data = path.read_bytes()
    return [at for at in range(0, len(data), BLOCK_NBYTES) if data[at : at + 4] == BATCH_MAGIC]


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


DAMAGES = {
    "a flipped bit": (40, b"\xff"),
    "a lost sector": (0, bytes(512)),
    "a lost block": (0, b"\xaa" * BLOCK_NBYTES),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_objects_behind_a_damaged_header_are_found(tmp_path: Path, damage: str) -> None:
    first, second, third = keys(0, 10), keys(10, 12), keys(30, 8)
    folder = killed(tmp_path, *([item_of(key, 1) for key in batch] for batch in (first, second, third)))
    (file,) = log_files(folder)
    at, data = DAMAGES[damage]
    overwrite(file, headers(file)[1] + at, data)
    for _ in range(2):  # the second start learns of it too, although nothing was confirmed
        with SsdLog.open(folder, CONFIG) as log:
            assert sorted(inventory(log)) == sorted(first + third)
            assert all(stored.doubt is Doubt.REMOVED for stored in log.items())
            salvaged = log.salvaged()
            assert sorted(stored.key for stored in salvaged) == sorted(second)
            assert all(stored.doubt is Doubt.SALVAGED for stored in salvaged)
            assert log.stats().damaged_nbytes >= 12 * 3 * BLOCK_NBYTES
            assert log.compact(1 << 30) == []  # the file is not touched before the master has spoken
    with SsdLog.open(folder, CONFIG) as log:
        confirmed = [(key, 1) for key in second[:7]]
        assert log.confirm([*confirmed, (b"unknown", 1)]) == 7
        log.remove([(key, 1) for key in second[7:]])
        assert sorted(inventory(log)) == sorted(first + second[:7] + third)
        assert log.salvaged() == []
        assert log.stats().num_salvaged == 7
        for key in second[:7]:
            assert is_object(read_object(log, key, 1), parts_of(key, 1))
        log.check_integrity()
        while log.compact(1 << 30):
            pass
        log.check_integrity()
        assert sorted(inventory(log)) == sorted(first + second[:7] + third)


def test_the_last_batch_of_a_log(tmp_path: Path) -> None:
    """Behind it there is nothing that would say that it was there; the objects do."""
    first, second = keys(0, 10), keys(10, 12)
    folder = killed(tmp_path, [item_of(key, 1) for key in first], [item_of(key, 1) for key in second])
    (file,) = log_files(folder)
    overwrite(file, headers(file)[1], b"\xaa" * BLOCK_NBYTES)
    with SsdLog.open(folder, CONFIG) as log:
        assert sorted(inventory(log)) == sorted(first)
        assert all(stored.doubt is Doubt.NONE for stored in log.items())  # no proof that anything was removed since
        assert sorted(stored.key for stored in log.salvaged()) == sorted(second)


def test_what_a_lost_tombstone_had_removed_is_in_doubt(tmp_path: Path) -> None:
    first, second, third = keys(0, 10), keys(10, 3), keys(20, 3)
    batches = [[item_of(key, 1) for key in batch] for batch in (first, second, third)]
    folder = killed(tmp_path, *batches, removed=(first[4],))
    (file,) = log_files(folder)
    with SsdLog.open(copy_as_is(folder, tmp_path / "good"), CONFIG) as log:
        assert first[4] not in inventory(log)
    for at in headers(file)[1:-1]:
        overwrite(file, at, bytes(BLOCK_NBYTES))
    with SsdLog.open(folder, CONFIG) as log:
        doubts = {stored.key: stored.doubt for stored in log.items()}
        assert doubts[first[4]] is Doubt.REMOVED


def test_damaged_objects_and_those_without_checksums_are_not_salvaged(tmp_path: Path) -> None:
    second = [item_of(key, 1) for key in keys(10, 5)]
    second.append(LogItem(b"bare", 1, parts_of(b"bare", 1, kind=ChecksumKind.NONE)))
    folder = killed(tmp_path, [item_of(b"first", 1)], second, [item_of(b"third", 1)])
    (file,) = log_files(folder)
    at = headers(file)[1]
    overwrite(file, at, bytes(BLOCK_NBYTES))
    data = file.read_bytes()
    piece = data.index(parts_of(b"key-12", 1)[1][:600])
    overwrite(file, piece + 100, b"\xff\0\xff")
    with SsdLog.open(folder, CONFIG) as log:
        assert sorted(stored.key for stored in log.salvaged()) == [b"key-10", b"key-11", b"key-13", b"key-14"]


def test_a_newer_record_or_tombstone_beats_a_salvaged_one(tmp_path: Path) -> None:
    folder = killed(
        tmp_path,
        [item_of(b"a", 1)],
        [item_of(b"a", 2), item_of(b"b", 2), item_of(b"c", 2)],
        [item_of(b"a", 3), item_of(b"d", 1)],
    )
    (file,) = log_files(folder)
    overwrite(file, headers(file)[1], bytes(BLOCK_NBYTES))
    with SsdLog.open(folder, CONFIG) as log:
        assert {(stored.key, stored.generation) for stored in log.salvaged()} == {(b"b", 2), (b"c", 2)}
        assert log.confirm([(b"a", 2)]) == 0
        assert inventory(log)[b"a"] == 3


def test_files_are_kept_for_salvaged_objects_until_these_are_settled(tmp_path: Path) -> None:
    """Refused ones, and those that a newer record beats, keep no file; an older object of the key stays."""
    folder = killed(
        tmp_path, [item_of(b"a", 1), item_of(b"z", 1)], [item_of(b"a", 2), item_of(b"b", 2)], [item_of(b"b", 3)]
    )
    (file,) = log_files(folder)
    overwrite(file, headers(file)[1], bytes(BLOCK_NBYTES))
    with SsdLog.open(folder, CONFIG) as log:
        assert [(stored.key, stored.generation) for stored in log.salvaged()] == [(b"a", 2)]
        log.compact(CONFIG.file_nbytes)
        assert log.drained() == []
        log.refuse([(b"a", 2)])
        assert log.salvaged() == []
        log.append_many([item_of(b"filler", 1)])
        log.compact(CONFIG.file_nbytes)
        assert len(log.drained()) == 1
        assert inventory(log) == {b"a": 1, b"z": 1, b"b": 3, b"filler": 1}
