"""`moonpool bench`: measure this machine; each figure is shown with a baseline from the same run."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.bench import store as bench_store
from moonpool.bench import transfer as bench_transfer

command = typer.Typer(no_args_is_help=True)


@command.command()
def transfer(
    json: Annotated[bool, typer.Option("--json", help="print one JSON object per line")] = False,
    rounds: Annotated[
        int, typer.Option(min=1, help="measurements per case; the best one is shown")
    ] = bench_transfer.ROUNDS,
    seconds: Annotated[float, typer.Option(min=0, help="seconds per measurement")] = bench_transfer.SECONDS,
) -> None:
    """Measure the tcp and shm transports between two processes on this machine (half a minute per round)."""
    bench_transfer.run(as_json=json, rounds=rounds, seconds=seconds)


@command.command()
def store(
    json: Annotated[bool, typer.Option("--json", help="print one JSON object per line")] = False,
    case: Annotated[
        list[str] | None, typer.Option(help=f"run only this case (may be repeated): {', '.join(bench_store.CASES)}")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="a smoke test of a few seconds; its figures mean nothing")
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="measurements per case; the best one is shown")] = None,
    objects: Annotated[int | None, typer.Option(min=1000, help="number of objects in the case `grow`")] = None,
    large: Annotated[bool, typer.Option("--large", help="ten million objects in the case `grow` (minutes)")] = False,
    folder: Annotated[str | None, typer.Option(help="folder on the disk that the case `ssd` measures")] = None,
) -> None:
    """Measure the pool (a master, a node, two clients) and, for comparison, plain loops, iperf3, redis and fio."""
    bench_store.run(
        as_json=json, cases=case or (), quick=quick, rounds=rounds, num_objects=objects, large=large, folder=folder
    )
