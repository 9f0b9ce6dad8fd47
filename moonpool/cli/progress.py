"""Progress of long work on standard error; nothing is shown if that is not a terminal."""

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
    """Show a bar with sizes and speed."""
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
    """Show a running count, for work whose total is not known."""
    if not shown or not sys.stderr.isatty():
        yield _show_nothing
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield lambda done, _: status.update(f"{what}: {done}")


@contextmanager
def virtual_time(what: str, total_s: float) -> Iterator[Callable[[float], None]]:
    """Show a bar over simulated seconds; it is full from `total_s` on."""
    if not sys.stderr.isatty():
        yield lambda now_s: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f} s"))
    elapsed = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *elapsed, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_s)
        yield lambda now_s: bar.update(task, completed=min(now_s, total_s))
