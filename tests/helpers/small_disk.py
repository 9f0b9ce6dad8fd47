"""File systems of their own for tests: small, and read-only on demand. They end with the test process at the latest
(see `own_mounts`). Where mounting is not allowed, the test is skipped."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_CLONE_NEWNS = 0x00020000


def own_mounts() -> None:
    """Give this thread, and all threads and processes that it starts later, mounts of their own. The kernel removes
    them with the last process: a test run that is killed leaves none behind. Does nothing where that is not allowed."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS) == 0:
        subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True)  # where it fails, tests cannot mount


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """`folder` is made, and is what `mount` with `arguments` puts there."""
    folder.mkdir()
    done = subprocess.run(["mount", *arguments, folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"NOT TESTED, mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file system of `nbytes` (whole pages) at `folder`."""
    with mounted(folder, "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs"):
        yield folder


def remount(folder: Path, mode: str) -> bool:
    """Make the file system at `folder` read-only (`mode` "ro") or writable ("rw"). Returns whether it is: it cannot
    become read-only while a file there is open for writing."""
    return subprocess.run(["mount", "-o", f"remount,{mode}", folder], capture_output=True).returncode == 0
