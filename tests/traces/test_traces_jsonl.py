"""Mooncake's format: byte for byte, and every wrong line by its number."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from trace_cases import BLOCK_TOKENS, CONVERSATION, HOURS, hour, make_trace, traces

from moonpool.base.errors import AlreadyExists, InvalidInput
from moonpool.traces.columns import Trace
from moonpool.traces.mooncake_jsonl import read_jsonl, write_jsonl

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}'
LATER = '{"timestamp": 3000, "input_length": 5, "output_length": 3, "hash_ids": [2]}'


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "small.jsonl"
    path.write_text(f"{GOOD}\n{LATER}\n")
    trace = read_jsonl(path)
    assert (trace.name, len(trace), trace.block_tokens) == ("small", 2, 512)
    assert trace.arrival_s.tolist() == [0.0, 3.0]
    assert next(iter(trace)).block_ids.tolist() == [0, 1]
    assert trace.tenant is None


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("nonsense", "is not JSON"),
        ("[1, 2]", "Expected `object`"),
        ("", "is empty; remove it"),
        (GOOD[:-9], "is not JSON"),
        (GOOD.replace("600", "NaN"), "is not JSON"),
        (GOOD.replace('"timestamp": 0, ', ""), "missing required field `timestamp`"),
        (GOOD.replace("600", "-600"), r"Expected `int` >= 1 - at `\$.input_length`"),
        (GOOD.replace("600", "0"), r"at `\$.input_length`"),
        (GOOD.replace("600", '"600"'), "Expected `int`, got `str`"),
        (GOOD.replace("600", "600.5"), "Expected `int`, got `float`"),
        (GOOD.replace(": 3", ": -3"), r"at `\$.output_length`"),
        (GOOD.replace("[0, 1]", "[0, -1]"), r"at `\$.hash_ids\[1\]`"),
        (GOOD.replace('"timestamp": 0', '"timestamp": -1'), r"at `\$.timestamp`"),
        (GOOD.replace('"timestamp": 0', '"timestamp": 1e400'), ""),
        (GOOD.replace("[0, 1]", "[0, 1, 2]"), "3 hash_ids for 600 tokens, where blocks of 512 make 2"),
        (GOOD.replace("[0, 1]", "[]"), "0 hash_ids for 600 tokens"),
        (GOOD.replace("[0, 1]", "[4, 4]"), "hash id 4 stands there twice"),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}", "is not JSON"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text(f"{GOOD}\n{line}\n{LATER}\n", encoding="latin-1")
    with pytest.raises(InvalidInput, match=rf"wrong.jsonl, line 2: .*{complaint}"):
        read_jsonl(path)


def test_time_that_goes_back_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "back.jsonl"
    path.write_text(f"{GOOD}\n{LATER}\n{GOOD}\n")
    with pytest.raises(InvalidInput, match=r"line 3: timestamp 0 is before 3000 .*; sort the file"):
        read_jsonl(path)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InvalidInput, match=r"empty.jsonl is empty"):
        read_jsonl(tmp_path / "empty.jsonl")
    with pytest.raises(InvalidInput, match=r"cannot read .*No such file"):
        read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(InvalidInput, match=r"cannot read .*directory"):
        read_jsonl(tmp_path)
    (tmp_path / "plain.jsonl.gz").write_text(GOOD)
    with pytest.raises(InvalidInput, match=r"plain\.jsonl\.gz"):
        read_jsonl(tmp_path / "plain.jsonl.gz")
    (tmp_path / "short.jsonl.gz").write_bytes(gzip.compress(f"{GOOD}\n".encode() * 100)[:-20])
    with pytest.raises(InvalidInput, match="damaged gzip"):
        read_jsonl(tmp_path / "short.jsonl.gz")


@given(trace=traces())
def test_what_is_written_is_read_back(trace: Trace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a.jsonl", "a.jsonl.gz"):
            path = Path(folder) / name
            write_jsonl(trace, path)
            again = read_jsonl(path, block_tokens=BLOCK_TOKENS)
            assert again == trace
            before = path.read_bytes()
            write_jsonl(again, path, replace=True)
            assert path.read_bytes() == before


@given(trace=traces())
def test_odd_times_are_stable_once_written(trace: Trace) -> None:
    odd = trace.replace(arrival_s=trace.arrival_s / 7)
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "first.jsonl", Path(folder) / "second.jsonl"
        write_jsonl(odd, first)
        write_jsonl(read_jsonl(first, block_tokens=BLOCK_TOKENS), second)
        assert first.read_bytes() == second.read_bytes()
        assert np.allclose(read_jsonl(first, block_tokens=BLOCK_TOKENS).arrival_s, odd.arrival_s, atol=1e-9)


def test_labels_are_two_more_fields(tmp_path: Path) -> None:
    trace = make_trace([(0.0, 4, 1, [0]), (1.0, 4, 1, [0])])
    path = tmp_path / "labelled.jsonl"
    write_jsonl(trace.replace(tenant=np.array([0, 5]), priority=np.array([2, 0])), path)
    lines = path.read_text().splitlines()
    assert lines[1].endswith('"hash_ids": [0], "tenant": 5, "priority": 0, "block_tokens": 4}')
    again = read_jsonl(path, block_tokens=BLOCK_TOKENS)
    assert again.tenant is not None
    assert again.tenant.tolist() == [0, 5]
    plain = lines[1].replace(', "tenant": 5, "priority": 0', "")
    path.write_text("\n".join([plain, lines[1], plain]))
    mixed = read_jsonl(path, block_tokens=BLOCK_TOKENS)
    assert mixed.tenant is not None
    assert mixed.tenant.tolist() == [0, 5, 0]


def test_a_file_is_not_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("mine")
    with pytest.raises(AlreadyExists, match="exists already"):
        write_jsonl(make_trace([(0.0, 4, 1, [0])]), path)
    assert path.read_text() == "mine"
    with pytest.raises(InvalidInput, match="cannot write"):
        write_jsonl(make_trace([(0.0, 4, 1, [0])]), tmp_path / "no" / "folder.jsonl")
    assert [file.name for file in tmp_path.iterdir()] == ["mine.jsonl"]


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_progress_rises_to_the_whole(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"long.{ending}"
    write_jsonl(make_trace([(float(second), 4, 1, [second]) for second in range(10_000)]), path)
    told: list[tuple[int, int]] = []
    read_jsonl(path, block_tokens=BLOCK_TOKENS, progress=lambda done, total: told.append((done, total)))
    nbytes = path.stat().st_size
    assert len(told) > 2
    assert told == sorted(told)
    assert told[-1] == (nbytes, nbytes)


@pytest.mark.parametrize("name", HOURS)
def test_an_hour_is_read_and_written_the_same(tmp_path: Path, name: str) -> None:  # fast: benchmarks/simulator.py
    path = CONVERSATION if name == "conversation" else tmp_path / "chat.jsonl"
    if path is not CONVERSATION:
        write_jsonl(hour(name), path)
    trace = read_jsonl(path)
    assert len(trace) == 12031
    assert trace == hour(name)
    write_jsonl(trace, tmp_path / "same.jsonl")
    assert (tmp_path / "same.jsonl").read_bytes() == path.read_bytes()
