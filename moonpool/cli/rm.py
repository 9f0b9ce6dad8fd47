"""`moonpool rm KEY...`."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.base.errors import Overloaded
from moonpool.cli.pool import HexOption, MasterOption, parse_key, pool


def command(
    keys: Annotated[list[str], typer.Argument(help="names of objects")],
    force: Annotated[bool, typer.Option("--force", help="even while they are being read or pinned")] = False,
    master: MasterOption = None,
    hex: HexOption = False,
) -> None:
    with pool(master) as client:
        gone = client.remove([parse_key(key, hex) for key in keys], force=force)
    kept = [key for key, is_gone in zip(keys, gone, strict=True) if not is_gone]
    if kept:
        raise Overloaded(f"in use and not removed (--force would): {', '.join(kept)}")
