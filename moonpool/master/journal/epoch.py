"""The number of the master's life: higher in each life than in all before it.

Generations are made from it, so one that came twice would let an old reader take new bytes for its own. The number is
that of the last life plus one, or the seconds since 2020 if these are more. It is on disk before anybody hears of it.
A disk that takes nothing (full, read-only, broken) does not keep the master from starting: then the number comes from
the clock, and is used only after its second has passed. Whatever life follows, with or without the file, begins in a
later second and has a higher number.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

from moonpool.base.errors import ConfigError
from moonpool.master.journal.folder import JournalFolder

EPOCH_BITS = 32
CLOCK_STARTS_S = 1_577_836_800  # 2020-01-01 UTC, as Unix time
_MAX_WAIT_S = 5
_FILE = "epoch"


class WallClock(NamedTuple):
    """Unix time, and how to let it pass."""

    now_s: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


class Epoch(NamedTuple):
    """`unkept` is why the number is not on disk; None when it is."""

    number: int
    unkept: OSError | None


def next_epoch(folder: JournalFolder, *, had_lives: bool, clock: WallClock | None = None) -> Epoch:
    """The epoch of the life that begins now. `had_lives`: there are signs of an earlier one, so there must be a file.

    ConfigError when the last one cannot be read, or the new one neither be kept nor taken from the clock. The caller
    holds the folder's lock. May wait a second for the clock.
    """
    clock = clock or WallClock()
    try:
        last = read_epoch(folder)
        if last is None and had_lives:
            raise ValueError("it is missing, though there is a journal; write a number above every earlier epoch to it")
        number = max((last or 0) + 1, _seconds(clock))
        if number >= 2**EPOCH_BITS:
            raise ValueError(f"{last} is the last that there can be")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the master's epoch in {folder.path / _FILE}: {error}", param="data_dir"
        ) from error
    try:
        keep_epoch(folder, number)
    except OSError as error:
        _let_second_pass(number, clock, folder, error)
        return Epoch(number, error)
    return Epoch(number, None)


def keep_epoch(folder: JournalFolder, number: int) -> None:
    """Write the epoch to its file; it is on disk when this returns. OSError."""
    try:
        _replace_file(folder, number)
    except OSError:
        _overwrite(folder, number)


def read_epoch(folder: JournalFolder) -> int | None:
    """The epoch of the last life that was kept, None when there was none. OSError, ValueError."""
    try:
        text = (folder.path / _FILE).read_text()
    except FileNotFoundError:
        return None
    if not (text.strip().isdecimal() and text.isascii()):
        raise ValueError(f"{text[:40]!r} is not an epoch")
    return int(text)


def _seconds(clock: WallClock) -> int:
    """Since 2020; 0 when the clock cannot be right."""
    seconds = int(clock.now_s()) - CLOCK_STARTS_S
    return seconds if 0 < seconds < 2 ** (EPOCH_BITS - 1) else 0


def _let_second_pass(number: int, clock: WallClock, folder: JournalFolder, unkept: OSError) -> None:
    wait_s = number + 1 + CLOCK_STARTS_S - clock.now_s()
    if wait_s > _MAX_WAIT_S:
        raise ConfigError(
            f"cannot write the master's epoch to {folder.path / _FILE} ({unkept.strerror or unkept}), and the clock is"
            f" {wait_s:.0f} s behind what an earlier master has used; make room on the disk or set the clock",
            param="data_dir",
        ) from unkept
    while wait_s > 0:
        clock.sleep(wait_s)
        wait_s = number + 1 + CLOCK_STARTS_S - clock.now_s()


def _replace_file(folder: JournalFolder, number: int) -> None:
    path = folder.path / _FILE
    fresh = path.with_suffix(".new")
    with open(fresh, "w") as file:
        file.write(f"{number}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    folder.sync()


def _overwrite(folder: JournalFolder, number: int) -> None:
    """Without taking new space: numbers only grow, and all their digits lie in one sector."""
    fd = os.open(folder.path / _FILE, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.pwrite(fd, f"{number}\n".encode(), 0)
        os.fsync(fd)
    finally:
        os.close(fd)
