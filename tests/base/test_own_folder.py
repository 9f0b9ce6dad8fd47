"""Folders of one process: private, removed by their owner, swept after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import HANG_S

from moonpool.base.own_folder import OwnFolder, is_owned, own_folders, sweep

KIND = "kind-"
OWNER = """
import os, sys
from pathlib import Path
from moonpool.base.own_folder import OwnFolder
folder = OwnFolder("kind-", Path(sys.argv[1]))
print(folder.path, flush=True)
if sys.argv[2] == "forks" and os.fork() == 0:
    sys.exit()
os.wait() if sys.argv[2] == "forks" else None
print("forked", flush=True)
input()
"""
# Programs that do not close what they own: their folder is removed when the process ends, unless it is killed.
STORE = """
import sys
from moonpool.store import Store
store = Store("unix:/nowhere.sock")
print("made", flush=True)
input()
"""
ENGINE = """
from moonpool.integrations.mooncake.engine_session import EngineSession
session = EngineSession("127.0.0.1", "P2PHANDSHAKE", "")
print("made", flush=True)
input()
"""


@contextmanager
def owner(base: Path, how: str = "plain") -> Iterator[tuple[subprocess.Popen[str], Path]]:
    command = [sys.executable, "-c", OWNER, str(base), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            folder = Path(process.stdout.readline().strip())
            assert process.stdout.readline() == "forked\n"
            yield process, folder
        finally:
            process.kill()


def test_it_is_private_and_gone_at_the_end(tmp_path: Path) -> None:
    owned = OwnFolder(KIND, tmp_path)
    assert owned.path.stat().st_mode & 0o777 == 0o700
    assert is_owned(owned.path)
    (owned.path / "x").touch()
    owned.close()
    owned.close()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_removes_its_own(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, folder):
        assert is_owned(folder)
        process.communicate("\n", timeout=HANG_S)
        assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_fork_that_ends_leaves_it_to_its_owner(tmp_path: Path) -> None:
    with owner(tmp_path, "forks") as (_, folder):
        assert is_owned(folder)


def test_what_a_killed_owner_left_is_removed_by_the_next_of_its_kind(tmp_path: Path) -> None:
    with owner(tmp_path) as (process, folder):
        assert sweep(tmp_path, KIND) == []
        process.send_signal(signal.SIGKILL)
        process.wait(HANG_S)
    assert own_folders(tmp_path, KIND) == [folder]
    assert not is_owned(folder)
    with OwnFolder("other-", tmp_path):
        assert folder.exists()
    with OwnFolder(KIND, tmp_path) as made:
        assert list(tmp_path.iterdir()) == [made]


def test_one_that_is_being_made_is_left_alone_until_it_is_old(tmp_path: Path) -> None:
    young = tmp_path / "kind-young"
    young.mkdir()
    assert sweep(tmp_path, KIND) == []
    os.utime(young, (0, 0))
    assert sweep(tmp_path, KIND) == [young]


def test_other_things_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kind-file").touch()
    (tmp_path / "target").mkdir()
    (tmp_path / "kind-link").symlink_to(tmp_path / "target")
    os.utime(tmp_path / "target", (0, 0))
    assert sweep(tmp_path, KIND) == []


@pytest.mark.parametrize("program", [STORE, ENGINE], ids=["store", "mooncake"])
def test_a_killed_program_leaves_nothing_for_long(program: str) -> None:
    """The next program of its kind finds what the killed one has left, and at its own end nothing is there."""
    with tempfile.TemporaryDirectory(prefix="mp-") as base:  # a short name: sockets are in it
        for ending in ("kill", "end"):
            with subprocess.Popen(
                [sys.executable, "-c", program],
                env={**os.environ, "TMPDIR": base},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as process:
                assert process.stdout is not None
                try:
                    assert process.stdout.readline() == "made\n"
                    assert len(os.listdir(base)) == 1
                    if ending == "end":
                        process.communicate("\n", timeout=HANG_S)
                finally:
                    process.kill()
        assert os.listdir(base) == []
