"""Shared by the commands that use a pool (put, get, ls, rm, stat, why): its master, its conductor and its credentials.

Nodes with guarded ports accept a command that has the same secret (MOONPOOL_SECRET_FILE) and, if they use TLS, a
certificate (MOONPOOL_TLS_CERT_FILE, MOONPOOL_TLS_KEY_FILE, MOONPOOL_TLS_CA_FILE).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Annotated, TypeVar

import typer

from moonpool.base.address import split_addresses
from moonpool.base.cluster import CONDUCTOR_SERVICE
from moonpool.base.errors import Unauthorized, Unavailable
from moonpool.base.rpc import BlockingClient, Call
from moonpool.base.run_dirs import conductor_beside
from moonpool.conductor.messages import TAKEOVER_S
from moonpool.store import Store
from moonpool.store.client import ClientConfig
from moonpool.store.client.config import CREDENTIAL_VARIABLES, find_master

CONDUCTOR_VARIABLE = "MOONPOOL_CONDUCTOR"
_R = TypeVar("_R")
_ASK_AGAIN_S = 0.2
_RETRY_S = 2.0  # shorter than in programs: a person waits for the result

MasterOption = Annotated[
    str | None,
    typer.Option(
        "--master", help="address of the master; default: $MOONPOOL_MASTER, or the service running on this machine"
    ),
]
ConductorOption = Annotated[
    str | None,
    typer.Option(
        "--conductor",
        help="address of the conductor, several separated by commas; default: $MOONPOOL_CONDUCTOR, or the one running "
        "on this machine",
    ),
]
HexOption = Annotated[bool, typer.Option("--hex", help="read and print keys in hexadecimal")]


def master_address(given: str | None) -> str:
    """Return `given`, or else the master that the environment names or that runs on this machine. Raise ConfigError."""
    return given or find_master("state the pool with --master ADDRESS")


def named_conductor(given: str | None) -> str | None:
    """Return `given`, or else what the environment names."""
    return given or os.environ.get(CONDUCTOR_VARIABLE) or None


def conductor_address(given: str | None, master: str) -> str | None:
    """Return `given`, or else the conductor that the environment names or that was started with that master on this
    machine; None if there is none."""
    return named_conductor(given) or conductor_beside(master)


def ask_conductor(address: str, call: Call[_R], timeout_s: float = 2.0) -> _R:
    """Return the reply of the first conductor in `address`, a list with commas, that does what is asked. Raise
    Unavailable if none does: they do not reply, or may not change workers."""
    addresses = split_addresses(address)
    for number, each in enumerate(addresses, start=1):
        try:
            connect = BlockingClient(each, CONDUCTOR_SERVICE, name="moonpool cli", connect_timeout_s=timeout_s)
            with closing(connect) as client:
                return client.call(call, timeout_s=timeout_s)
        except Unavailable:
            if number == len(addresses):
                raise
    raise AssertionError("there is at least one address")


def change_workers(address: str, call: Call[_R]) -> _R:
    """Return the reply of the conductor that may change workers, as `ask_conductor` does. Ask again for a while: when
    that conductor has just ended, another one gets the right some seconds later."""
    deadline_s = time.monotonic() + TAKEOVER_S
    while True:
        try:
            return ask_conductor(address, call)
        except Unavailable:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(_ASK_AGAIN_S)


@contextmanager
def pool(master: str | None) -> Iterator[Store]:
    """Yield the pool of the master at that address; None: of the master that `master_address` finds."""
    address = master_address(master)
    with Store(address, config=ClientConfig(name="moonpool cli", retry_s=_RETRY_S)) as store:
        try:
            yield store
        except Unauthorized as error:
            raise Unauthorized(
                f"{error} (this command reads the file names from {', '.join(CREDENTIAL_VARIABLES.values())})"
            ) from error
