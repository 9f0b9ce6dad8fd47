"""Journals of earlier and of later versions: the former are read, the latter refused with a way out."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
from journal_world import BY_HAND, image_of, reopened, replayed

from moonpool import __version__
from moonpool.base.checksum import crc32c
from moonpool.base.errors import Corrupt
from moonpool.master.journal import Journal, describe, frames
from moonpool.master.journal.folder import FolderLock, JournalFolder, read_lock
from moonpool.master.journal.frames import FORMAT, HEADER_NBYTES
from moonpool.master.state import records

# By format: the digest of its record classes. To change a record, raise FORMAT in frames.py and add a line here.
RECORDS = {2: "35ecbc3dca4ba341", 3: "8d79c67905e91fde", 4: "747c8ce6e61b8a34"}


def digest_of_records() -> str:
    shapes = sorted(
        f"{each.__name__}({', '.join(f'{name}: {kind}' for name, kind in each.__annotations__.items())})"
        for each in records.Record.__subclasses__()
    )
    return hashlib.blake2b("\n".join(shapes).encode(), digest_size=8).hexdigest()


def test_records_that_change_have_another_format() -> None:
    assert RECORDS.get(FORMAT) == digest_of_records(), "raise FORMAT in frames.py and add a line to RECORDS"
    assert len(set(RECORDS.values())) == len(RECORDS)


def set_format(path: Path, number: int) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into("<H", content, 4, number)
    struct.pack_into("<I", content, 16, crc32c(bytes(content[:16])))
    path.write_bytes(content)


def a_folder(tmp_path: Path) -> Path:
    journal, _ = Journal.open(tmp_path, BY_HAND)
    journal.append(b"first")
    journal.close()
    return tmp_path


def test_a_later_format_is_refused_with_both_versions_and_the_way_out(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    set_format(folder / "journal-0", FORMAT + 1)
    write_as(folder, "9.9.9")
    before = image_of(folder)
    with pytest.raises(Corrupt) as refused:
        Journal.open(folder, BY_HAND)
    for part in (
        f"journal-0 has format {FORMAT + 1}",
        f"this is Moonpool {__version__}, which reads formats up to {FORMAT}",
        "start Moonpool 9.9.9, or a later one",
        "nothing was changed",
        "--forget-journal",
    ):
        assert part in str(refused.value)
    assert {name: content for name, content in image_of(folder).items() if name != "lock"} == {
        name: content for name, content in before.items() if name != "lock"
    }
    note, _ = read_lock(JournalFolder(folder))
    assert note is not None
    assert note.moonpool == "9.9.9", "the next start that is refused names it again"
    report = describe(folder, check=True)
    assert report.problem is not None
    assert "Moonpool 9.9.9" in report.problem


def write_as(folder: Path, version: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moonpool.master.journal.folder.__version__", version)
        lock = FolderLock(JournalFolder(folder))
        lock.record_writer()
        lock.release()


def test_an_earlier_format_is_read_and_not_added_to(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    set_format(folder / "journal-0", 1)
    journal, found = Journal.open(folder, BY_HAND)
    assert list(found) == [b"first"]
    journal.append(b"second")
    journal.close()
    assert replayed(folder) == [b"first", b"second"]
    assert b"second" not in (folder / "journal-0").read_bytes()
    assert format_of(folder / "journal-0") == 1
    assert format_of(folder / "journal-1") == FORMAT
    assert reopened(folder) == [b"first", b"second"]


def format_of(path: Path) -> int:
    found = frames.parse_header(path.read_bytes()[:HEADER_NBYTES], frames.FileKind.JOURNAL, int(path.name[8:]), path)
    assert isinstance(found, int)
    return found
