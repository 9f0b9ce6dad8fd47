"""Run directories: private, removed by their owner, swept after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.run_dirs import live_run_dirs
from moonpool.launch.run_dir import RunDir, sweep

OWNER = """
import sys, time
from pathlib import Path
from moonpool.launch.run_dir import RunDir
print(RunDir(Path(sys.argv[1])).path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory of our own whose name is short: tmp_path leaves too little room for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="mp-") as path:
        yield Path(path)


def test_it_is_private_and_gone_at_the_end(base: Path) -> None:
    with RunDir(base) as run_dir:
        assert run_dir.path.stat().st_mode & 0o777 == 0o700
        assert live_run_dirs(base) == [run_dir.path]
        (run_dir.path / "x.sock").touch()
    assert list(base.iterdir()) == []
    run_dir.close()


def test_a_killed_owner_leaves_a_directory_that_the_next_one_sweeps(base: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(base)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        stale = Path(owner.stdout.readline().strip())
        assert sweep(base) == []
        assert live_run_dirs(base) == [stale]
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    assert live_run_dirs(base) == []
    with RunDir(base) as run_dir:
        assert list(base.iterdir()) == [run_dir.path]


def test_one_that_is_being_made_is_left_alone_until_it_is_old(tmp_path: Path) -> None:
    young = tmp_path / "moonpool-young"
    young.mkdir()
    assert sweep(tmp_path) == []
    os.utime(young, (0, 0))
    assert sweep(tmp_path) == [young]


def test_other_things_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "moonpool-file").touch()
    (tmp_path / "target").mkdir()
    (tmp_path / "moonpool-link").symlink_to(tmp_path / "target")
    os.utime(tmp_path / "target", (0, 0))
    assert sweep(tmp_path) == []


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(ConfigError, match="too long"):
        RunDir(deep)
    assert list(deep.iterdir()) == []
