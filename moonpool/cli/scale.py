"""`moonpool scale prefill=3 decode=1`: change how many workers a running service has on this machine.

New workers are started, and get requests as soon as they are ready; those that are too many end what they have begun
and leave. Workers count in the role that they have now. With `--elastic` the conductor goes on moving workers between
the roles: this command decides how many there are, the conductor what they do.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from moonpool.base.cluster import LAUNCHER_SERVICE
from moonpool.base.config import nearest
from moonpool.base.errors import ConfigError, InvalidInput, Unavailable
from moonpool.base.rpc import BlockingClient, Call
from moonpool.base.run_dirs import LAUNCHER, live_run_dirs, read_url, socket_address
from moonpool.cli.waiting import BoundedWait
from moonpool.launch.messages import ListWorkers, Scale

_R = TypeVar("_R")
_ROLES = ("prefill", "decode")
_SAY_EVERY_S = 5.0
_CALL_S = 30.0


def command(
    counts: Annotated[list[str], typer.Argument(metavar="ROLE=NUMBER...", help="prefill=3, decode=1, or both")],
    wait: Annotated[bool, typer.Option(help="wait until the new workers are ready and the others have left")] = True,
    timeout: Annotated[float, typer.Option(help="seconds to wait at most; the change goes on after them")] = 300.0,
    run_dir: Annotated[
        Path | None, typer.Option(help="run directory of the service; default: the one service running here")
    ] = None,
) -> None:
    wanted = parse_counts(counts)
    address = socket_address(run_dir or _only_service(), LAUNCHER)
    reply = _ask(address, Scale(**wanted))
    if not reply.started and not reply.draining:
        print("nothing changes: the service has that many workers")
        return
    for verb, names in (("starting", reply.started), ("draining", reply.draining)):
        if names:
            print(f"{verb} {', '.join(names)}", flush=True)
    if wait:
        _wait(address, set(reply.started), set(reply.draining), timeout)
        print("done")


def parse_counts(words: list[str]) -> dict[str, int]:
    """Return the numbers by role. Raise InvalidInput for anything but `prefill=N` and `decode=N`, each once."""
    found: dict[str, int] = {}
    for word in words:
        role, _, number = word.partition("=")
        if role not in _ROLES:
            raise InvalidInput(f"{role!r} is no role of workers; write prefill=3 or decode=1{nearest(role, _ROLES)}")
        if not number.isdigit():
            raise InvalidInput(f"{word!r} has no number; write {role}=3")
        if role in found:
            raise InvalidInput(f"{role} is given twice")
        found[role] = int(number)
    return found


def _only_service() -> Path:
    """Return the run directory of the service of this user on this machine. Raise ConfigError if there is not one."""
    running = live_run_dirs()
    if len(running) != 1:
        many = "no service of this user runs" if not running else f"{len(running)} services of this user run"
        known = "".join(f"\n  --run-dir {each}  ({read_url(each) or 'not ready'})" for each in running)
        raise ConfigError(f"{many} on this machine" + (f"; choose one:{known}" if known else ""))
    return running[0]


def _ask(address: str, call: Call[_R]) -> _R:
    try:
        with closing(BlockingClient(address, LAUNCHER_SERVICE, name="moonpool cli", connect_timeout_s=2.0)) as client:
            return client.call(call, timeout_s=_CALL_S)
    except Unavailable as error:
        raise Unavailable(f"the launcher did not do it: {error}") from error


def _wait(address: str, started: set[str], draining: set[str], timeout_s: float) -> None:
    progress = BoundedWait(timeout_s, _SAY_EVERY_S, unmet="not complete", goes_on="it")
    while True:
        workers = {each.name: each for each in _ask(address, ListWorkers())}
        starting = [name for name in sorted(started) if name in workers and not workers[name].is_ready]
        leaving = [name for name in sorted(draining) if name in workers]
        if not starting and not leaving:
            return
        ends = [f"{name} ended: {workers[name].last_end}" for name in starting if workers[name].last_end]
        left = "; ".join([*(f"{name} starts" for name in starting), *(f"{name} drains" for name in leaving), *ends])
        progress.pause(left)
