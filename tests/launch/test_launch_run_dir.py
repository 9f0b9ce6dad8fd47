"""Run directories: private, with short names, found while their launcher lives."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.run_dirs import live_run_dirs
from moonpool.launch.run_dir import make_run_dir


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory of our own whose name is short: tmp_path leaves too little room for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="mp-") as path:
        yield Path(path)


def test_it_is_found_while_it_is_owned_and_gone_at_the_end(base: Path) -> None:
    with make_run_dir(base) as run_dir:
        assert live_run_dirs(base) == [run_dir]
        (run_dir / "x.sock").touch()
    assert live_run_dirs(base) == []
    assert list(base.iterdir()) == []


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(ConfigError, match="too long"):
        make_run_dir(deep)
    assert list(deep.iterdir()) == []
