"""A secret comes from a private file and shows up nowhere else."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest

from moonpool.base.errors import ConfigError
from moonpool.base.security import Secret

VALUE = b"correct horse battery staple"


def secret_file(folder: Path, content: bytes, mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_a_secret_comes_from_a_private_file(tmp_path: Path) -> None:
    assert Secret.from_file(secret_file(tmp_path, b"\n  " + VALUE + b" \n")) == Secret(VALUE)


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (VALUE, 0o644, "chmod 600"),
        (VALUE, 0o602, "chmod 600"),
        (b"  short  \n", 0o600, "at least 16 bytes"),
        (b"", 0o600, "at least 16 bytes"),
        (bytes(5000), 0o600, "larger than 4096"),
    ],
)
def test_an_unfit_secret_file_is_refused_without_showing_it(
    tmp_path: Path, content: bytes, mode: int, says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Secret.from_file(secret_file(tmp_path, content, mode))
    assert "correct horse" not in str(caught.value)
    assert "short" not in str(caught.value)


def test_no_file_no_pipe_and_no_folder_is_a_secret(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("missing", "pipe", "."):
        with pytest.raises(ConfigError):
            Secret.from_file(str(tmp_path / name))
    open_files = [fd.resolve() for fd in Path("/proc/self/fd").iterdir()]
    assert not [file for file in open_files if file.is_relative_to(tmp_path)], "none is left open"


def test_a_secret_is_not_shown_copied_or_pickled() -> None:
    secret = Secret(VALUE)
    for text in (repr(secret), str(secret), f"{secret}", repr([secret])):
        assert "correct" not in text
    for leak in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError):
            leak(secret)
    with pytest.raises(TypeError):
        hash(secret)
    assert secret != Secret(VALUE + b".")
    assert secret != VALUE
