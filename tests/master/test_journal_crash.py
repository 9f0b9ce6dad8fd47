"""Whatever a crash leaves of the files, the next life gets a beginning of what was appended, and all that was synced.

What was synced before a crash is intact after it; of the rest, any 4 KiB page may have been written or not, and the
file may end anywhere. Damage to synced bytes is something else, and must be told.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from journal_world import BY_HAND, Image, Life, image_of, put_back, reopened, replayed

from moonpool.base.errors import Corrupt
from moonpool.master.journal import Journal

PAGE = 4096
sizes = st.lists(st.sampled_from([8, 40, 700, 3000, 9000]), min_size=1, max_size=4)
steps = st.lists(st.one_of(sizes, st.just("sync"), st.just("rotate")), min_size=1, max_size=14)


def live(directory: Path, script: list[list[int] | str]) -> tuple[Life, Image]:
    life = Life(directory)
    for step in script:
        if step == "sync":
            life.sync()
        elif step == "rotate":
            life.rotate()
        else:
            assert isinstance(step, list)
            life.append(*step)
    return life, life.cut_off()


def power_lost(content: bytes, synced_nbytes: int, data: st.DataObject) -> bytes:
    """A file of which only the first bytes are sure."""
    left = bytearray(content[: data.draw(st.integers(synced_nbytes, len(content)), label="size")])
    for page in range(synced_nbytes // PAGE, -(-len(left) // PAGE)):
        start, end = max(synced_nbytes, page * PAGE), min(len(left), (page + 1) * PAGE)
        fate = data.draw(st.sampled_from(["written", "zeros", "garbage"]), label=f"page {page}")
        if fate != "written":
            left[start:end] = bytes(end - start) if fate == "zeros" else b"\xa5" * (end - start)
    return bytes(left)


def after_power_loss(life: Life, image: Image, data: st.DataObject) -> Image:
    journals = [name for name in image if name.startswith("journal-")]
    return image | {name: power_lost(image[name], life.synced_nbytes.get(name, 0), data) for name in journals}


@settings(max_examples=60, deadline=None)
@given(script=steps, data=st.data())
def test_power_loss_loses_only_what_was_not_synced(script: list[list[int] | str], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        life, image = live(Path(name) / "first", script)
        left = put_back(after_power_loss(life, image, data), Path(name) / "left")
        found = replayed(left)
        assert found == life.records[: len(found)]
        assert len(found) >= life.num_synced


@settings(max_examples=25, deadline=None)
@given(script=steps, data=st.data())
def test_the_next_lives_go_on_from_there(script: list[list[int] | str], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        life, image = live(Path(name) / "first", script)
        left = put_back(after_power_loss(life, image, data), Path(name) / "left")
        journal, records = Journal.open(left, BY_HAND)
        journal.append(b"the second life")
        found = list(records)  # read while the second life appends
        journal.append(b"goes on")
        journal.close()
        assert found == life.records[: len(found)]
        assert reopened(left) == [*found, b"the second life", b"goes on"]


@settings(max_examples=60, deadline=None)
@given(script=steps, data=st.data())
def test_a_flipped_bit_costs_nothing_synced_unless_it_is_told(
    script: list[list[int] | str], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        life, image = live(Path(name) / "first", script)
        file = data.draw(st.sampled_from([each for each in image if each.startswith("journal-")]))
        content = bytearray(image[file])
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        left = put_back(image | {file: bytes(content)}, Path(name) / "left")
        try:
            found = replayed(left)
        except Corrupt:
            return
        assert found == life.records[: len(found)]
        assert len(found) >= life.num_synced


def test_every_cut_of_the_last_journal_leaves_a_beginning(tmp_path: Path) -> None:
    life, image = live(tmp_path / "first", [[40, 8], "rotate", [30], "sync", [8, 90], [60]])
    content, counts = image["journal-1"], []
    for size in range(life.synced_nbytes["journal-1"], len(content) + 1):
        found = replayed(put_back(image | {"journal-1": content[:size]}, tmp_path / "left"))
        assert found == life.records[: len(found)]
        counts.append(len(found))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (3, 6)


def test_every_garbled_byte_of_what_was_synced_is_told(tmp_path: Path) -> None:
    life, image = live(tmp_path / "first", [[40, 8], "rotate", [30], "sync", [8, 90], "sync"])
    for name in ("journal-0", "journal-1"):
        for at in range(life.synced_nbytes[name]):
            garbled = image[name][:at] + bytes([image[name][at] ^ 0xFF]) + image[name][at + 1 :]
            with pytest.raises(Corrupt, match=name):
                replayed(put_back(image | {name: garbled}, tmp_path / "left"))


def test_a_mark_behind_what_came_during_its_sync_does_not_speak_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life(tmp_path / "first")
    life.append(40)
    real, during = os.fdatasync, []

    def sync(fd: int) -> None:
        real(fd)
        during.append(image_of(tmp_path / "first"))
        life.append(50)

    monkeypatch.setattr(os, "fdatasync", sync)
    life.journal.sync()
    monkeypatch.undo()
    size, image = len(during[0]["journal-0"]), life.cut_off()
    content = bytearray(image["journal-0"])
    content[size + 20] ^= 1
    assert replayed(put_back(image | {"journal-0": bytes(content)}, tmp_path / "left")) == life.records[:1]


def test_a_sync_reaches_every_file_since_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life, real, synced = Life(tmp_path), os.fdatasync, []

    def sync(fd: int) -> None:
        real(fd)
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    monkeypatch.setattr(os, "fdatasync", sync)
    for _ in range(2):
        life.append(10)
        life.rotate()
    life.sync()
    assert synced == ["journal-0", "journal-1", "journal-2"]  # the oldest first: a mark speaks for all before it
    life.journal.close()


def test_a_cut_tail_is_logged_and_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, image = live(tmp_path / "first", [[40], "sync", [100]])
    left = put_back(image | {"journal-0": image["journal-0"][:-9]}, tmp_path / "left")
    with caplog.at_level(logging.WARNING):
        assert len(reopened(left)) == 1
    assert "its last 99 bytes are cut off" in caplog.text
    caplog.clear()
    assert len(reopened(left)) == 1
    assert not caplog.records


def test_a_journal_that_cannot_follow_is_kept_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    life, image = live(tmp_path / "first", [[40], "sync", [100], "rotate", [50]])
    left = put_back(image | {"journal-0": image["journal-0"][:-9]}, tmp_path / "left")  # its end never got to disk
    assert reopened(left) == life.records[:2]
    [aside] = left.glob("aside-*")
    assert (aside / "journal-1").read_bytes() == image["journal-1"]
    assert "journal-1" in caplog.text
    assert reopened(left) == life.records[:2]


def test_bytes_behind_the_end_of_a_journal_are_told(tmp_path: Path) -> None:
    _, image = live(tmp_path / "first", [[40], "rotate", [50]])
    with pytest.raises(Corrupt, match="bytes follow its end"):
        replayed(put_back(image | {"journal-0": image["journal-0"] + b"?"}, tmp_path / "left"))


def test_a_missing_journal_is_told_and_nothing_is_touched(tmp_path: Path) -> None:
    _, image = live(tmp_path / "first", [[40], "rotate", [50], "rotate", [60]])
    for name in ("journal-0", "journal-1"):
        rest = {each: content for each, content in image.items() if each != name}
        left = put_back(rest, tmp_path / f"without-{name}")
        with pytest.raises(Corrupt, match=f"{name} is missing.*--forget-journal"):
            Journal.open(left)
        assert {path.name for path in left.iterdir()} == set(rest)
