"""`moonpool why WHAT`: what became of a request (asked of the conductor) or of a key (asked of the pool).

A request is known by the id in its answer, its x-request-id header or the conductor's own id. Requests come first: no
key that a pool of KV has looks like a request's id.
"""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from moonpool.base.cluster import CONDUCTOR_SERVICE
from moonpool.base.errors import Unavailable
from moonpool.base.rpc import BlockingClient
from moonpool.base.run_dirs import live_run_dirs, socket_address
from moonpool.cli.pool import HexOption, MasterOption, pool
from moonpool.conductor.messages import ExplainedRecord, ExplainRequest
from moonpool.server.launch_plan import CONDUCTOR
from moonpool.server.record_ids import bare_id
from moonpool.store.api.keys_text import read_key

_ASK_S = 5.0


def command(
    what: Annotated[
        str, typer.Argument(metavar="REQUEST_ID|KEY", help="a request's id, or a key stored now or earlier")
    ],
    master: MasterOption = None,
    hex: HexOption = False,
    conductor: Annotated[
        str | None,
        typer.Option(help="address of the conductor; default: those of the services that run on this machine"),
    ] = None,
) -> None:
    found = [] if hex else _find_request(what, conductor)
    for each in found:
        print("\n".join(each.lines))
    if not found:
        _explain_key(what, master, hex, asked_conductor=not hex)


def _find_request(request_id: str, address: str | None) -> list[ExplainedRecord]:
    """Of the first conductor that knows it. One that was named must answer; those that were found may be stopping."""
    if address is not None:
        return _ask(address, request_id)
    for run_dir in live_run_dirs():
        try:
            found = _ask(socket_address(run_dir, CONDUCTOR), request_id)
        except Unavailable:
            continue
        if found:
            return found
    return []


def _ask(address: str, request_id: str) -> list[ExplainedRecord]:
    with closing(BlockingClient(address, CONDUCTOR_SERVICE, name="why", connect_timeout_s=_ASK_S)) as client:
        return client.call(ExplainRequest(request_id=bare_id(request_id)), timeout_s=_ASK_S)


def _explain_key(key: str, master: str | None, hex: bool, *, asked_conductor: bool) -> None:
    if asked_conductor:
        typer.echo(f"no conductor has a record of a request {key!r}; as a key of the pool:", err=True)
    with pool(master) as store:
        print(store.why(read_key(key, hex)))
