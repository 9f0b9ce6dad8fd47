"""`moonpool top`: what the service does, in the terminal, from GET /v1/status. Finds the local service as `stat` does.

Keys: q ends, s changes the order of workers, r shows requests and w workers, up and down (k, j) choose a request, Enter
explains it. `--once` prints it once, for scripts and bug reports; `--json` prints the answer as it came.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from moonpool.base.errors import ConfigError, InvalidInput, NotFound, ProtocolError, Unauthorized, Unavailable
from moonpool.base.run_dirs import live_run_dirs, read_state_dir, read_url
from moonpool.cli import top_view
from moonpool.frontend.status_reply import StatusReply
from moonpool.frontend.tenants import load_admin_key

_PERIOD_S = 1.0
_TIMEOUT_S = 5.0
_NUM_REQUESTS = 200
_HELP = "q end, s sort, w workers, r requests, j k choose, Enter explain"
_UP, _DOWN = "\x1b[A", "\x1b[B"


def command(
    once: Annotated[bool, typer.Option("--once", help="print it once and exit")] = False,
    json: Annotated[bool, typer.Option("--json", help="print the answer of /v1/status once, as JSON")] = False,
    url: Annotated[
        str | None, typer.Option(help="URL of the front end, without /v1; default: the service running on this machine")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="default: $MOONPOOL_API_KEY, or the admin key of the service on this machine")
    ] = None,
) -> None:
    with closing(StatusClient(*_find(url, api_key))) as client:
        if json:
            print(client.read("/v1/status").decode())
        elif once or not sys.stdout.isatty():
            Console(width=None if sys.stdout.isatty() else 100).print(top_view.overview(client.status()))
        else:
            _watch(client)


def _find(url: str | None, api_key: str | None) -> tuple[str, str | None]:
    """Return the front end's URL and a key. Raise ConfigError unless one service, or the URL, is known."""
    key = api_key or os.environ.get("MOONPOOL_API_KEY")
    if url is not None:
        return url.rstrip("/").removesuffix("/v1"), key
    found = [(place, run_dir) for run_dir in live_run_dirs() if (place := read_url(run_dir)) is not None]
    if len(found) != 1:
        many = "no service of this user is" if not found else f"{len(found)} services of this user are"
        raise ConfigError(f"{many} running on this machine; name one with --url")
    place, run_dir = found[0]
    state_dir = read_state_dir(run_dir)
    return place, key or (load_admin_key(Path(state_dir)) if state_dir is not None else None)


class StatusClient:
    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def read(self, path: str) -> bytes:
        """Return the body. Raise Unavailable if there is no front end, or the error that it answers with."""
        try:
            reply = self._http.get(path)
        except httpx.HTTPError as error:
            raise Unavailable(f"no front end answers at {self._url}: {error}") from error
        if reply.status_code == 200:
            return reply.content
        kinds = {401: Unauthorized, 404: NotFound, 400: InvalidInput}
        raise kinds.get(reply.status_code, Unavailable)(_message(reply))

    def status(self) -> StatusReply:
        try:
            return msgspec.json.decode(self.read("/v1/status"), type=StatusReply)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self._url} answers in another format; is it another version? {error}") from error

    def records(self, path: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = msgspec.json.decode(self.read(path))["data"]
        return found


def _message(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the front end answers with HTTP {reply.status_code}"


@dataclass
class TopScreen:
    """What is shown, and what keys change. `client` answers."""

    client: StatusClient
    sort: str = top_view.SORTS[0]
    shows_requests: bool = False
    chosen: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # that explain a request
    problem: str = ""

    def press(self, key: str) -> bool:
        """Act on a key. Return False if it ends the program."""
        if key == "s":
            at = top_view.SORTS.index(self.sort)
            self.sort = top_view.SORTS[(at + 1) % len(top_view.SORTS)]
        elif key in ("r", "w"):
            self.shows_requests, self.lines = key == "r", []
        elif key in ("j", _DOWN, "k", _UP):
            self.chosen += 1 if key in ("j", _DOWN) else -1
        elif key in ("\r", "\n"):
            self._explain()
        return key not in ("q", "\x03")

    def _explain(self) -> None:
        if self.lines:
            self.lines = []
        elif self.shows_requests and self.records:
            try:
                found = self.client.records(f"/v1/records/{self.records[self.chosen]['request_id']}")
                self.lines = [line for each in found for line in each["lines"]]
            except (NotFound, Unavailable) as error:
                self.lines = [str(error)]

    def render(self, height: int) -> RenderableType:
        """Read the service again and return what to show, in at most `height` lines."""
        try:
            status = self.client.status()
            if not self.shows_requests:
                return Group(top_view.overview(status, self.sort), Text(f"sorted by {self.sort}; {_HELP}"[:79], "dim"))
            self.records = self.client.records(f"/v1/records?limit={_NUM_REQUESTS}")[::-1]
        except Unavailable as error:
            return Text(str(error), "red")
        self.chosen = max(0, min(self.chosen, len(self.records) - 1))
        if self.lines:
            return Group(Text("\n".join(self.lines[: height - 2])), Text(_HELP, "dim"))
        return Group(top_view.requests(self.records, self.chosen, height - 3), Text(_HELP, "dim"))


def _watch(client: StatusClient) -> None:
    console, screen = Console(), TopScreen(client)
    with _keys() as descriptor, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(screen.render(console.size.height), refresh=True)
            ready, _, _ = select.select([descriptor], [], [], _PERIOD_S)
            if ready and not screen.press(os.read(descriptor, 16).decode(errors="replace")):
                return


@contextmanager
def _keys() -> Iterator[int]:
    """Let single keys arrive without Enter, and restore the terminal afterwards."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
