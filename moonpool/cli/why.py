"""`moonpool why KEY`."""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.cli.pool import HexOption, MasterOption, pool
from moonpool.store.api.keys_text import read_key


def command(
    key: Annotated[str, typer.Argument(help="a key, stored now or earlier")],
    master: MasterOption = None,
    hex: HexOption = False,
) -> None:
    with pool(master) as store:
        print(store.why(read_key(key, hex)))
