"""`moonpool put KEY FILE`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moonpool.base.errors import AlreadyExists, InvalidInput
from moonpool.base.units import format_nbytes
from moonpool.cli.pool import HexOption, MasterOption, parse_key, pool


def command(
    key: Annotated[str, typer.Argument(help="under which name")],
    file: Annotated[str, typer.Argument(help="what to store; - is standard input")],
    replicas: Annotated[int, typer.Option(help="number of copies, each on another node")] = 1,
    pinned: Annotated[bool, typer.Option("--pinned", help="never evict it")] = False,
    master: MasterOption = None,
    hex: HexOption = False,
) -> None:
    data = _read(file)
    with pool(master) as client:
        if not client.put(parse_key(key, hex), data, num_replicas=replicas, pinned=pinned):
            raise AlreadyExists(f"{key!r} is in the pool already; remove it first")
    print(f"stored {format_nbytes(len(data))} as {key}", file=sys.stderr)


def _read(file: str) -> bytes:
    if file == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {file}: {error.strerror or error}") from error
