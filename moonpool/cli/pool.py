"""What the commands on the pool (put, get, ls, rm, stat, why) share: finding the master and what its nodes ask for.

Nodes that guard their ports let a command in that has the same secret (MOONPOOL_SECRET_FILE) and, where they speak TLS,
a certificate (MOONPOOL_TLS_CERT_FILE, MOONPOOL_TLS_KEY_FILE, MOONPOOL_TLS_CA_FILE).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from moonpool.base.errors import Unauthorized
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.store.finding import CREDENTIAL_VARIABLES, find_master

_RETRY_S = 2.0  # people wait less gladly than programs for a master that may come back

MasterOption = Annotated[
    str | None,
    typer.Option(
        "--master", help="address of the master; default: $MOONPOOL_MASTER, or the service running on this machine"
    ),
]
HexOption = Annotated[bool, typer.Option("--hex", help="read and print keys in hexadecimal")]


@contextmanager
def pool(master: str | None) -> Iterator[Store]:
    """The pool of the master at that address, or of the one that can be found."""
    address = master or find_master("state the pool with --master ADDRESS")
    with Store(address, config=ClientConfig(name="moonpool cli", retry_s=_RETRY_S)) as store:
        try:
            yield store
        except Unauthorized as error:
            raise Unauthorized(
                f"{error} (this command reads the file names from {', '.join(CREDENTIAL_VARIABLES.values())})"
            ) from error
