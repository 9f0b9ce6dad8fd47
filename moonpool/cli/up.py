"""`moonpool up FILE --machine NAME`: this machine's part of a cluster that one file describes.

The same file goes to all machines, and is checked as a whole on each before anything starts. `--check` checks it and
starts nothing.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from moonpool.cli.model import fetch_if_named
from moonpool.launch.cluster_file import ClusterFile, read_cluster
from moonpool.launch.serve import up


def command(
    file: Annotated[Path, typer.Argument(help="the cluster file (TOML); docs/operations.md describes it")],
    machine: Annotated[
        str | None, typer.Option(help="name of this machine in the file; default: its host name")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="print what the file describes and start nothing")] = False,
) -> None:
    cluster = read_cluster(file)
    if check:
        print("\n".join(_lines(cluster)))
    else:
        up(cluster, machine or socket.gethostname(), prepare_model=fetch_if_named)


def _lines(cluster: ClusterFile) -> list[str]:
    lines = [f"master {cluster.master_address}, conductor {cluster.conductor_address}"]
    for machine in cluster.machines.values():
        names = [*machine.node_names, *machine.worker_names]
        if machine.serve.frontends:
            names.append(f"front end at http://{machine.host}:{machine.serve.port}/v1")
        lines.append(f"{machine.name} ({machine.host}): {', '.join(names) or 'nothing else'}")
    return lines
