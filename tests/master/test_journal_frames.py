"""The journal's files byte by byte: what is written is read, and what was not written is never yielded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonpool.base.errors import Corrupt, InvalidInput
from moonpool.master.journal.frames import (
    CONTROL_NBYTES,
    END,
    HEADER_NBYTES,
    MARK,
    MAX_RECORD_NBYTES,
    Control,
    FileKind,
    RecordFile,
    find_mark,
    pack_control,
    pack_header,
    pack_records,
)

quick = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(path: Path, content: bytes) -> tuple[list[bytes], RecordFile]:
    path.write_bytes(content)
    file = RecordFile(path, FileKind.JOURNAL, 7)
    return list(file.records()), file


def a_file(*records: bytes, ended: bool = False) -> bytes:
    content = pack_header(FileKind.JOURNAL, 7) + (pack_records(records) if records else b"")
    return content + pack_control(Control(END, len(content), 0)) if ended else content


def test_the_format_is_the_documented_one() -> None:
    assert pack_header(FileKind.JOURNAL, 7).hex() == "4d504a4c040001000700000000000000e0cf76a2"
    assert pack_records(b"abc").hex() == "03000000c4ff65dc616263"
    assert pack_control(Control(MARK, 31, 31)).hex() == (
        "18000080393a794b4d504a2d4d41524b1f000000000000001f00000000000000"
    )


@quick
@given(records=st.lists(st.binary(min_size=1, max_size=300), max_size=20), ended=st.booleans())
def test_what_is_written_is_read(tmp_path: Path, records: list[bytes], ended: bool) -> None:
    content = a_file(*records, ended=ended)
    found, file = read(tmp_path / "f", content)
    assert found == records
    assert (file.end, file.fault, file.whole) == (len(content), None, ended)


def test_no_flipped_bit_and_no_cut_goes_unseen(tmp_path: Path) -> None:
    records = [b"a", b"bc" * 20, b"\0" * 30, b"MPJ-MARK" * 3]
    content = a_file(*records, ended=True)
    for at in range(HEADER_NBYTES, len(content)):
        for bit in (0, 3, 7):
            flipped = bytearray(content)
            flipped[at] ^= 1 << bit
            found, file = read(tmp_path / "f", bytes(flipped))
            assert not file.whole
            assert found == records[: len(found)]
        found, file = read(tmp_path / "f", content[:at])
        assert not file.whole
        assert found == records[: len(found)]


@pytest.mark.parametrize("nbytes", [1, 7, 8, 4096])
def test_zeros_are_no_records(tmp_path: Path, nbytes: int) -> None:
    found, file = read(tmp_path / "f", a_file(b"x") + bytes(nbytes))
    assert found == [b"x"]
    assert file.end == len(a_file(b"x"))
    assert file.fault is not None


def test_bytes_behind_the_end_are_a_fault(tmp_path: Path) -> None:
    _, file = read(tmp_path / "f", a_file(b"x", ended=True) + pack_records(b"y"))
    assert file.fault == "bytes follow its end"


@pytest.mark.parametrize(
    ("kind", "number", "says"), [(FileKind.SNAPSHOT, 7, "another name"), (FileKind.JOURNAL, 8, "another name")]
)
def test_a_file_under_another_name_is_refused(tmp_path: Path, kind: FileKind, number: int, says: str) -> None:
    with pytest.raises(Corrupt, match=says):
        read(tmp_path / "f", pack_header(kind, number))


@pytest.mark.parametrize("records", [b"", [b"x", b""]])
def test_an_empty_record_is_refused(records: bytes | list[bytes]) -> None:
    with pytest.raises(InvalidInput, match=str(MAX_RECORD_NBYTES)):
        pack_records(records)


@pytest.mark.parametrize("before", [0, 5, 1024 * 1024 - CONTROL_NBYTES, 1024 * 1024 - 9, 1024 * 1024 - 1, 3_000_000])
def test_a_mark_is_found_behind_anything(tmp_path: Path, before: int) -> None:
    path = tmp_path / "f"
    mark = Control(MARK, 100 + before, 200)
    path.write_bytes(b"M" * (100 + before) + pack_control(mark) + b"behind it")
    assert find_mark(path, 100, covers=150) == mark
    assert find_mark(path, 100, covers=200) is None
    assert find_mark(path, mark.at + 1, covers=150) is None


def test_a_mark_copied_into_a_record_is_not_one(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"\0" * 50 + pack_control(Control(MARK, 49, 9000)) + b"MPJ-MARK")
    assert find_mark(path, 0, covers=0) is None
