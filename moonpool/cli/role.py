"""`moonpool role WORKER prefill|decode|auto`: change what a running worker computes.

The worker ends what it has begun in its old role; no request is lost. `auto` lets the conductor change the role as the
load moves. Waits until the worker has the role.
"""

from __future__ import annotations

import time
from typing import Annotated, Literal

import typer

from moonpool.base.cluster import WorkerInfo, WorkerRole
from moonpool.base.errors import DeadlineExceeded
from moonpool.base.run_dirs import conductor_beside
from moonpool.cli.pool import (
    CONDUCTOR_VARIABLE,
    ConductorOption,
    ask_conductor,
    change_workers,
    master_address,
    named_conductor,
)
from moonpool.conductor.messages import SetRole, Status

_TIMEOUT_S = 10.0
_POLL_S = 0.05


def command(
    worker: Annotated[str, typer.Argument(help="name of the worker, as `moonpool stat` lists it")],
    role: Annotated[
        Literal["prefill", "decode", "auto"],
        typer.Argument(help="the role to take and keep; auto: the conductor changes it as the load moves"),
    ],
    conductor: ConductorOption = None,
) -> None:
    wanted = None if role == "auto" else WorkerRole(role)
    address = named_conductor(conductor) or conductor_beside(master_address(None))
    if address is None:
        raise typer.BadParameter(
            f"no conductor runs on this machine; name one with --conductor or {CONDUCTOR_VARIABLE}"
        )
    change_workers(address, SetRole(worker=worker, role=wanted))
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not _is_so(info := _info(address, worker), wanted):
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"{worker} has not changed its role within {_TIMEOUT_S:g} s; is it alive?")
        time.sleep(_POLL_S)
    assert info is not None
    print(f"{worker} is a {info.role} worker" + ("" if info.fixed else "; the conductor may change that"))


def _info(address: str, worker: str) -> WorkerInfo | None:
    """Return what the conductor knows of the worker; None while it registers again."""
    return next((one.info for one in ask_conductor(address, Status()).workers if one.info.name == worker), None)


def _is_so(info: WorkerInfo | None, wanted: WorkerRole | None) -> bool:
    if info is None or info.fixed != (wanted is not None):
        return False
    return wanted is None or info.role is wanted
