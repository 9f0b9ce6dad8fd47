"""The `moonpool` command in a process of its own, without what starting Python costs (forked_script.py): exit code,
output, environment and working folder are those of a real process. That `python -m moonpool` starts at all is for other
tests.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forked_script import ForkServer, fork_server
from waiting import HANG_S

_SCRIPT = Path(__file__).with_name("moonpool_command.py")
Command = Callable[..., subprocess.CompletedProcess[str]]


def _run(server: ForkServer, arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryFile() as errors:
        process = server.start(*arguments, environment=environment, stderr=errors.fileno())
        process.stdin.close()
        hangs = threading.Timer(HANG_S, process.kill)
        hangs.start()
        with process.stdout:
            out = process.stdout.read()
        status = process.wait(HANG_S)
        hangs.cancel()
        return subprocess.CompletedProcess(arguments, status, out, os.pread(errors.fileno(), 1 << 24, 0).decode())


@contextmanager
def forked_cli(*loads: str) -> Iterator[Command]:
    """Yield what runs a command: arguments as words, further environment by name. Each of `loads` is a command, or a
    module that a command imports only when it runs."""
    with fork_server(_SCRIPT, *loads) as server:
        yield lambda *arguments, **environment: _run(server, [str(each) for each in arguments], environment)
