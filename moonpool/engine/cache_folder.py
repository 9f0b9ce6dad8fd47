"""The folder of fetched and prepared model files: `MOONPOOL_CACHE`, or ~/.cache/moonpool.

Several processes may need the same file at once. Each file is made under a lock and appears whole or not at all: it is
written to a temporary file in the same folder, synced and renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from moonpool.base.errors import ModelError


def cache_folder(*parts: str) -> Path:
    """Return a folder inside the cache; create it if it is missing."""
    root = os.environ.get("MOONPOOL_CACHE")
    folder = Path(root) if root else Path.home() / ".cache" / "moonpool"
    folder = folder.joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"the cache folder {folder} cannot be created ({error.strerror}); set MOONPOOL_CACHE to another one"
        ) from error
    return folder


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of `target`, across processes. The kernel releases it if this process dies."""
    lock = target.with_name(target.name + ".lock")
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Yield a path to write to. On success the file becomes `target`, on failure it is removed."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, target)
    except OSError as error:
        raise ModelError(f"{target} could not be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
