"""`moonpool why KEY`."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.cli.pool import HexOption, MasterOption, parse_key, pool


def command(
    key: Annotated[str, typer.Argument(help="a key, stored now or earlier")],
    master: MasterOption = None,
    hex: HexOption = False,
) -> None:
    with pool(master) as client:
        print(client.why(parse_key(key, hex)))
