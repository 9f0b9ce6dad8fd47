"""`moonpool doctor`: what works here, what is missing, and how to get it.

Exit code 0 when `moonpool serve` with its defaults would work on this machine, 1 otherwise, with the reasons.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from moonpool.cli.doctor_checks import examine_machine
from moonpool.cli.doctor_text import in_words
from moonpool.transfer.topology import read_topology


def command(
    json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    topology: Annotated[
        Path | None,
        typer.Option("--topology", help="JSON file that assigns NICs to memory (docs/transfer.md)"),
    ] = None,
) -> None:
    report = examine_machine(read_topology(topology))
    typer.echo(msgspec.json.encode(report).decode() if json else in_words(report))
    if not report.ok:
        raise typer.Exit(1)
