"""`moonpool bench`: what this machine does, each figure beside its baseline from the same run."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.cli import bench_transfer

command = typer.Typer(no_args_is_help=True)


@command.callback()
def _group() -> None:
    """Keeps `transfer` a command of its own while it is the only one."""


@command.command()
def transfer(
    json: Annotated[bool, typer.Option("--json", help="for programs: one JSON object per line")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="how often each case is measured; the best counts")] = 3,
    seconds: Annotated[float, typer.Option(min=0, help="how long each measurement takes")] = 1.0,
) -> None:
    """Speed of the tcp and shm transports between two processes of this machine (half a minute per round)."""
    bench_transfer.run(as_json=json, rounds=rounds, seconds=seconds)
