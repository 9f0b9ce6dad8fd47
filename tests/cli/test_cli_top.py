"""`moonpool top` through a pseudo-terminal of 80x24, and once for scripts, against a real front end."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from waiting import HANG_S

from moonpool.cli.top import StatusClient
from moonpool.cli.top_view import SORTS, bar, levels, overview, sort_workers
from moonpool.frontend.status_reply import WorkerRow

sys.path.insert(0, str(Path(__file__).parents[1] / "frontend"))
from frontend_cluster import MODEL, ToyCluster

BODY = {"model": MODEL, "prompt": "once upon a time", "seed": 3, "max_tokens": 5, "ignore_eos": True}


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, *command: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env, close_fds=True)
        os.close(slave)
        self.shown = ""

    def read_until(self, text: str) -> None:
        """Read what comes until `text` is on the screen."""
        deadline, self.shown = time.monotonic() + HANG_S, ""
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} did not come: {self.shown[-2000:]}"
            if select.select([self._master], [], [], 0.2)[0]:
                self.shown += re.sub(
                    r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(self._master, 65536).decode(errors="replace")
                )

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ToyCluster]:
    async with ToyCluster(tmp_path, expected_workers=("prefill0", "decode0", "decode9")) as cluster:
        async with cluster.client() as http:
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        yield cluster


def command(cluster: ToyCluster, *options: str) -> list[str]:
    return [sys.executable, "-m", "moonpool", "top", "--url", cluster.url, *options]


async def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(subprocess.run, arguments, capture_output=True, text=True, timeout=HANG_S)


async def test_keys_in_a_terminal(cluster: ToyCluster) -> None:
    terminal = Terminal(*command(cluster))

    def drive() -> int:
        terminal.read_until("sorted by name")
        assert "degraded: Worker decode9 is not registered." in terminal.shown
        for name in ("prefill0", "decode0", "decode9", "gone"):
            assert name in terminal.shown
        terminal.press("s")
        terminal.read_until("sorted by running")
        terminal.press("r")
        terminal.read_until("prefill0 > decode0")
        terminal.press("\r")
        terminal.read_until("was chosen")
        terminal.press("w")
        terminal.read_until("sorted by running")
        terminal.press("q")
        return terminal.process.wait(HANG_S)

    try:
        assert await asyncio.to_thread(drive) == 0
    finally:
        terminal.close()


async def test_once_and_json(cluster: ToyCluster) -> None:
    shown = await run(*command(cluster, "--once"))
    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"Moonpool {MODEL}, policy cost" in shown.stdout
    assert "\x1b" not in shown.stdout
    as_json = await run(*command(cluster, "--json"))
    assert json.loads(as_json.stdout)["model"] == MODEL


async def test_a_front_end_that_is_not_there_is_one_line() -> None:
    shown = await run(sys.executable, "-m", "moonpool", "top", "--once", "--url", "http://127.0.0.1:9")
    assert shown.returncode == 1
    assert shown.stderr.startswith("moonpool top: no front end answers at http://127.0.0.1:9")
    assert shown.stderr.count("\n") == 1


def row(name: str, **fields: Any) -> WorkerRow:
    return WorkerRow(name=name, role="decode", machine="m", is_up=True, num_pages=100, **fields)


def test_workers_in_order() -> None:
    rows = [row("a", num_waiting=1), row("b", num_running=5), row("c", used_pages=50)]
    first = {sort: sort_workers(rows, sort)[0].name for sort in SORTS}
    assert first == {"name": "a", "running": "b", "queue": "a", "pages": "c"}


def test_bars_and_levels() -> None:
    assert bar([(50, "red"), (25, "blue")], 100, 20).plain == "█" * 15 + "·" * 5
    assert bar([(5, "red")], 0, 4).plain == "····"
    assert levels([0, 4, 8]) == " ▄█"
    assert levels([]) == ""
    assert levels([0, 0]) == "  "


async def test_it_fits_80_columns(cluster: ToyCluster) -> None:
    with closing(StatusClient(cluster.url, None)) as client:
        status = await asyncio.to_thread(client.status)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(overview(status))
    lines = console.export_text().splitlines()
    assert len(lines) <= 23
    assert max(map(len, lines)) <= 80
