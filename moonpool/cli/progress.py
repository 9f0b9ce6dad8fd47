"""Progress of long work on standard error, for people only: nothing is shown where it is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Show: TypeAlias = Callable[[int, int | None], None]  # how much is done, of how much


def _show_nothing(done: int, total: int | None) -> None:
    pass


@contextmanager
def bytes_moved(what: str) -> Iterator[Show]:
    """A bar with sizes and speed."""
    if not sys.stderr.isatty():
        yield _show_nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def objects_seen(what: str, shown: bool = True) -> Iterator[Show]:
    """A running count: how many there are is known at the end."""
    if not shown or not sys.stderr.isatty():
        yield _show_nothing
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield lambda done, _: status.update(f"{what}: {done}")
