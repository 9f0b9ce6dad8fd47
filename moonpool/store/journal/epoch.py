"""The number of the master's life: one more each time, and on disk before anybody hears of it.

Generations are made from it, so one that came twice would let an old reader take new bytes for its own.
"""

from __future__ import annotations

import os

from moonpool.base.errors import ConfigError
from moonpool.store.journal.folder import Folder

EPOCH_BITS = 32
_FILE = "epoch"


def next_epoch(folder: Folder, *, had_lives: bool) -> int:
    """The epoch of the life that begins now. `had_lives`: there are signs of an earlier one, so there must be a file.

    ConfigError when it cannot be read or kept. The caller holds the folder's lock.
    """
    path = folder.path / _FILE
    try:
        last = read_epoch(folder)
        if last is None and had_lives:
            raise ValueError("it is missing, though there is a journal; write a number above every earlier epoch to it")
        fresh = (last or 0) + 1
        if fresh >= 2**EPOCH_BITS:
            raise ValueError(f"{last} is the last that there can be")
        _write_synced(folder, fresh)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot keep the master's epoch in {path}: {error}", param="data_dir") from error
    return fresh


def read_epoch(folder: Folder) -> int | None:
    """The epoch of the last life, None when there was none. OSError, ValueError."""
    try:
        text = (folder.path / _FILE).read_text()
    except FileNotFoundError:
        return None
    if not (text.strip().isdecimal() and text.isascii()):
        raise ValueError(f"{text[:40]!r} is not an epoch")
    return int(text)


def _write_synced(folder: Folder, epoch: int) -> None:
    path = folder.path / _FILE
    fresh = path.with_suffix(".new")
    with open(fresh, "w") as file:
        file.write(f"{epoch}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    folder.sync()
