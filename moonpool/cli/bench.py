"""`moonpool bench`: measure this machine; each figure is shown with a baseline from the same run. `compare` names the
figures that became worse.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from moonpool.base.errors import InvalidInput
from moonpool.bench import store as bench_store
from moonpool.bench import transfer as bench_transfer
from moonpool.bench.history import LOST_SHARE, CaseChange
from moonpool.bench.history import compare as compare_lines
from moonpool.bench.report import (
    HISTORY,
    HISTORY_HELP,
    JSON_HELP,
    QUICK_NOT_RECORDED,
    RECORD_HELP,
    BenchReport,
    read_history,
)

command = typer.Typer(no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help=JSON_HELP)]
RecordOption = Annotated[bool, typer.Option("--record", help=RECORD_HELP)]
HistoryOption = Annotated[Path, typer.Option(help=HISTORY_HELP)]


@command.command()
def transfer(
    json: JsonOption = False,
    record: RecordOption = False,
    history: HistoryOption = HISTORY,
    rounds: Annotated[
        int, typer.Option(min=1, help="measurements per case; the best one is shown")
    ] = bench_transfer.ROUNDS,
    seconds: Annotated[float, typer.Option(min=0, help="seconds per measurement")] = bench_transfer.SECONDS,
) -> None:
    """Measure the tcp and shm transports between two processes on this machine (half a minute per round)."""
    report = BenchReport("transfer", as_json=json, history=history if record else None)
    bench_transfer.run(report, rounds=rounds, seconds=seconds)


@command.command()
def store(
    json: JsonOption = False,
    record: RecordOption = False,
    history: HistoryOption = HISTORY,
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
    if quick and record:
        raise InvalidInput(QUICK_NOT_RECORDED)
    report = BenchReport("store", as_json=json, history=history if record else None)
    bench_store.run(
        report, cases=case or (), quick=quick, rounds=rounds, num_objects=objects, large=large, folder=folder
    )


@command.command()
def compare(json: JsonOption = False, history: HistoryOption = HISTORY) -> None:
    """Name each case that became a fifth slower than at earlier commits; exit with status 1 if there is one.

    The best run of the newest commit in the history is compared with the median of the best runs of up to five commits
    before it, on machines of the same kind. A machine that was slower itself is allowed for.
    """
    changes = compare_lines(read_history(history))
    lost = [change for change in changes if change.lost]
    for change in changes if json else lost:
        print(msgspec.json.encode(change).decode() if json else _as_text(change))
    if not json:
        num_known = sum(change.kept is not None for change in changes)
        commit = changes[0].commit if changes else "the newest commit"
        print(f"{len(lost)} of {num_known} cases lost {LOST_SHARE:.0%} or more at {commit}; "
              f"{len(changes) - num_known} have no earlier figure")  # fmt: skip
    if lost:
        raise typer.Exit(1)


def _as_text(change: CaseChange) -> str:
    figures = f"{change.value:,.6g} {change.unit} instead of {change.before:,.6g}"
    return f"{change.bench}: {change.case}: {figures}, {change.kept:.2f} of the speed at {change.num_earlier} commits"
