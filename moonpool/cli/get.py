"""`moonpool get KEY`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moonpool.base.errors import InvalidInput, NotFound
from moonpool.cli.pool import HexOption, MasterOption, parse_key, pool


def command(
    key: Annotated[str, typer.Argument(help="the object's name")],
    out: Annotated[str, typer.Option(help="file to write to; - is standard output")] = "-",
    master: MasterOption = None,
    hex: HexOption = False,
) -> None:
    with pool(master) as client:
        data = client.get(parse_key(key, hex))
        if data is None:
            raise NotFound(f"{key!r} cannot be had: {client.why(parse_key(key, hex))}")
    _write(out, data)


def _write(out: str, data: bytes) -> None:
    if out == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    try:
        Path(out).write_bytes(data)
    except OSError as error:
        raise InvalidInput(f"cannot write {out}: {error.strerror or error}") from error
