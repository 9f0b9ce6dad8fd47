"""`moonpool why WHAT`: what happened to a request (the conductor knows) or to a key (the pool knows).

A request is named by the id in its answer, its x-request-id header or the conductor's own id. The conductor is asked
first: no key of a KV block looks like a request's id. The exit code is 1 if neither knows WHAT.
"""

from __future__ import annotations

from typing import Annotated

import typer

from moonpool.base.errors import NotFound, Unavailable
from moonpool.base.run_dirs import conductors_in, live_run_dirs
from moonpool.cli.pool import ConductorOption, HexOption, MasterOption, ask_conductor, named_conductor, pool
from moonpool.conductor.messages import ExplainedRecord, ExplainRequest
from moonpool.frontend import bare_id
from moonpool.master.state.changes import NEVER_STORED
from moonpool.store.keys_text import read_key

_TIMEOUT_S = 5.0
_KEYS_HINT = "`moonpool ls` lists the keys of the pool; keys of KV blocks need --hex"


def command(
    what: Annotated[
        str, typer.Argument(metavar="REQUEST_ID|KEY", help="id of a request, or key of an object that is or was stored")
    ],
    master: MasterOption = None,
    hex: HexOption = False,
    conductor: ConductorOption = None,
) -> None:
    found = [] if hex else _find_request(what, named_conductor(conductor))
    for each in found:
        print("\n".join(each.lines))
    if not found:
        _explain_key(what, master, hex)


def _find_request(request_id: str, address: str | None) -> list[ExplainedRecord]:
    """Return the records of the first conductor that has some. Raise if it was named and does not reply; others
    may be stopping, and are skipped."""
    if address is not None:
        return _ask(address, request_id)
    for each in (each for run_dir in live_run_dirs() for each in conductors_in(run_dir).split(",") if each):
        try:
            found = _ask(each, request_id)
        except Unavailable:
            continue
        if found:
            return found
    return []


def _ask(address: str, request_id: str) -> list[ExplainedRecord]:
    return ask_conductor(address, ExplainRequest(request_id=bare_id(request_id)), timeout_s=_TIMEOUT_S)


def _explain_key(key: str, master: str | None, hex: bool) -> None:
    """Print what happened to the key; raise NotFound, with a hint, if neither a conductor nor the pool knows it."""
    with pool(master) as store:
        answer = store.why(read_key(key, hex))
    if not answer.startswith(NEVER_STORED):
        print(answer)
    elif hex:
        raise NotFound(f"the pool never held the key {key!r}; {_KEYS_HINT}")
    else:
        raise NotFound(
            f"nothing is known of {key!r}: no conductor on this machine has a record of such a request, and the pool "
            f"never held such a key. The id of a request is the `id` in its answer, or its x-request-id header. A "
            f"conductor keeps the newest records only; GET /v1/records lists them. {_KEYS_HINT}"
        )
