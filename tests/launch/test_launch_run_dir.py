"""Run directories: private, with short names, found while their launcher lives."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.run_dirs import live_run_dirs, read_url, write_url
from moonpool.launch.run_dir import RunDir


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory of our own whose name is short: tmp_path leaves too little room for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="mp-") as path:
        yield Path(path)


def test_it_is_found_while_it_is_owned_and_gone_at_the_end(base: Path) -> None:
    with RunDir(base) as run_dir:
        assert live_run_dirs(base) == [run_dir]
        (run_dir / "x.sock").touch()
    assert live_run_dirs(base) == []
    assert list(base.iterdir()) == []


def test_it_is_made_again_with_its_files(base: Path) -> None:
    folder = RunDir(base)
    folder.keep(partial(write_url, folder.path, "http://here"))
    assert not folder.restore(), "it is there"
    shutil.rmtree(folder.path)
    assert live_run_dirs(base) == []
    assert folder.restore()
    assert live_run_dirs(base) == [folder.path]
    assert read_url(folder.path) == "http://here"
    assert folder.path.stat().st_mode & 0o777 == 0o700
    (folder.path / "owner.lock").unlink()  # then the next service that starts would take the folder for a stale one
    assert folder.restore()
    assert live_run_dirs(base) == [folder.path]
    folder.close()
    assert list(base.iterdir()) == []


def test_it_is_not_made_again_where_another_process_has_made_it(base: Path) -> None:
    with RunDir(base) as other:
        folder = RunDir(base)
        folder.path.rename(base / "moved")
        other.rename(folder.path)
        with pytest.raises(FileExistsError, match="another process has made it"):
            folder.restore()
        folder.path.rename(other)
        folder.close()


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(ConfigError, match="too long"):
        RunDir(deep)
    assert list(deep.iterdir()) == []
