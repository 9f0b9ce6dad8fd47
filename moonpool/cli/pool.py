"""What the commands on the pool (put, get, rm, stat, why) share: finding the master, what its nodes ask for, and keys
as people write them.

Nodes that guard their ports let a command in that has the same secret (MOONPOOL_SECRET_FILE) and, where they speak TLS,
a certificate (MOONPOOL_TLS_CERT_FILE, MOONPOOL_TLS_KEY_FILE, MOONPOOL_TLS_CA_FILE).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from moonpool.base.errors import ConfigError, InvalidInput, Unauthorized
from moonpool.server.launch_plan import MASTER, socket_address
from moonpool.server.launch_run_dir import live_run_dirs
from moonpool.store.client import ClientConfig, StoreClient
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine

MasterOption = Annotated[
    str | None,
    typer.Option(
        "--master", help="address of the master; default: MOONPOOL_MASTER, else the one service running on this machine"
    ),
]
_VARIABLES = {
    "secret_file": "MOONPOOL_SECRET_FILE",
    "tls_cert_file": "MOONPOOL_TLS_CERT_FILE",
    "tls_key_file": "MOONPOOL_TLS_KEY_FILE",
    "tls_ca_file": "MOONPOOL_TLS_CA_FILE",
}
HexOption = Annotated[bool, typer.Option("--hex", help="keys are written in hexadecimal")]


@contextmanager
def pool(master: str | None) -> Iterator[StoreClient]:
    """A client of the master at that address, or of the one that can be found."""
    address = master or os.environ.get("MOONPOOL_MASTER") or _running_master()
    with tempfile.TemporaryDirectory(prefix="mp-cli-") as run_dir:
        with TransferEngine(TransferConfig(run_dir=run_dir, tcp_host=None, num_threads=1, **_credentials())) as engine:
            with StoreClient(address, engine, ClientConfig(name="moonpool cli")) as client:
                try:
                    yield client
                except Unauthorized as error:
                    raise Unauthorized(
                        f"{error} (this command takes the files from {', '.join(_VARIABLES.values())})"
                    ) from error


def parse_key(text: str, is_hex: bool) -> bytes:
    """InvalidInput when it is not the hexadecimal it claims to be."""
    if not is_hex:
        return text.encode()
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise InvalidInput(f"{text!r} is not hexadecimal") from error


def _credentials() -> dict[str, Any]:
    return {setting: os.environ.get(variable) or None for setting, variable in _VARIABLES.items()}


def _running_master() -> str:
    running = live_run_dirs()
    if len(running) != 1:
        found = "no service runs" if not running else f"{len(running)} services run"
        raise ConfigError(f"{found} on this machine; say which pool with --master ADDRESS")
    return socket_address(running[0], MASTER)
