"""`moonpool bench`: what this machine does, each figure beside its baseline from the same run."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.bench import store as bench_store
from moonpool.bench import transfer as bench_transfer

command = typer.Typer(no_args_is_help=True)


@command.command()
def transfer(
    json: Annotated[bool, typer.Option("--json", help="for programs: one JSON object per line")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="how often each case is measured; the best counts")] = 3,
    seconds: Annotated[float, typer.Option(min=0, help="how long each measurement takes")] = 1.0,
) -> None:
    """Speed of the tcp and shm transports between two processes of this machine (half a minute per round)."""
    bench_transfer.run(as_json=json, rounds=rounds, seconds=seconds)


@command.command()
def store(
    json: Annotated[bool, typer.Option("--json", help="for programs: one JSON object per line")] = False,
    case: Annotated[list[str] | None, typer.Option(help=f"may be repeated: {', '.join(bench_store.CASES)}")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="seconds in all: shows that it works, not how fast")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="how often each case is measured; the best counts")] = None,
    objects: Annotated[int | None, typer.Option(min=1000, help="how many the case `grow` grows to")] = None,
    large: Annotated[bool, typer.Option("--large", help="grow to ten million (some minutes)")] = False,
    folder: Annotated[str | None, typer.Option(help="on the disk that the case `ssd` measures")] = None,
) -> None:
    """Speed of the pool: a master, a node and two clients, beside plain loops, iperf3, redis and fio."""
    bench_store.run(
        as_json=json, cases=case or (), quick=quick, rounds=rounds, num_objects=objects, large=large, folder=folder
    )
