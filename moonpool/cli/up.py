"""`moonpool up FILE --machine NAME`: this machine's part of a cluster that one file describes.

The same file goes to all machines, and is checked as a whole on each before anything starts. `--check` checks it and
starts nothing. The environment does not change the cluster's settings, because they must be the same everywhere.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from moonpool.base.config_file import CONFIG_VARIABLE, read_tables
from moonpool.cli.model import fetch_if_named
from moonpool.cli.options import ConfigOption, chosen_file
from moonpool.cli.roles import role_tables
from moonpool.launch.cluster_file import ClusterFile, read_cluster
from moonpool.launch.serve import up

MACHINE_VARIABLE = "MOONPOOL_MACHINE"

FileArgument = Annotated[
    Path | None, typer.Argument(help="the cluster file (TOML), as with -c; docs/operations.md describes it")
]
MachineOption = Annotated[
    str | None,
    typer.Option(help=f"name of this machine in the file; default: ${MACHINE_VARIABLE}, or its host name"),
]


def command(
    ctx: typer.Context,
    file: FileArgument = None,
    machine: MachineOption = None,
    config: ConfigOption = None,
    check: Annotated[bool, typer.Option("--check", help="print what the file describes and start nothing")] = False,
) -> None:
    path = cluster_path(ctx, file or config)
    cluster = read_cluster(path)
    tables = role_tables(path, read_tables(path))
    if check:
        print("\n".join(_lines(cluster)))
    else:
        up(cluster, machine_name(machine), prepare_model=fetch_if_named, role_tables=tables)


def cluster_path(ctx: typer.Context, given: Path | None) -> Path:
    """Return the cluster file. A command line without one, and no variable, is a wrong command line."""
    path = chosen_file(given)
    if path is None:
        ctx.fail(f"Name the cluster file: `moonpool up FILE`, `-c FILE`, or {CONFIG_VARIABLE}.")
    return path


def machine_name(given: str | None) -> str:
    """Return the name of this machine in the cluster file."""
    return given or os.environ.get(MACHINE_VARIABLE) or socket.gethostname()


def _lines(cluster: ClusterFile) -> list[str]:
    lines = [f"master {cluster.master_address}, conductor {cluster.conductor_address}"]
    for machine in cluster.machines.values():
        names = [*machine.node_names, *machine.worker_names]
        if machine.serve.frontends:
            names.append(f"front end at http://{machine.host}:{machine.serve.port}/v1")
        lines.append(f"{machine.name} ({machine.host}): {', '.join(names) or 'nothing else'}")
    return lines
