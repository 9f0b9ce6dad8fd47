"""One child process of the launcher: `python -m moonpool ROLE --option value ...`, the same as typed by hand.

It runs in its own session, so that Ctrl-C reaches the launcher alone. It inherits the read end of the lifeline and a
pipe on which it reports {"ready": address} or {"error": message} (base/process.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from moonpool.base.config import option_name
from moonpool.base.process import EXIT_DRAINED, Lifeline, ReadyReport
from moonpool.launch.role_settings import child_environment

_MAX_REPORT_NBYTES = 64 * 1024


class Child:
    """Make one with `await Child.start(...)`; await `report()`, then `wait()`."""

    def __init__(self, process: asyncio.subprocess.Process, ready_fd: int) -> None:
        self._process = process
        self._ready = os.fdopen(ready_fd, "rb", buffering=0)

    @classmethod
    async def start(
        cls, command: str, options: Mapping[str, object], lifeline: Lifeline, log_path: Path | None
    ) -> Child:
        read_fd, write_fd = os.pipe()
        argv = [sys.executable, "-m", "moonpool", command, *to_arguments(options), "--ready-fd", str(write_fd)]
        try:
            with _output(log_path) as output:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(write_fd, lifeline.fd),
                    env={**child_environment(options, os.environ), **lifeline.environment},
                    start_new_session=True,
                )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        return cls(process, read_fd)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def report(self) -> ReadyReport | None:
        """Return the child's report; None if the child ended without one. Call once."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=_MAX_REPORT_NBYTES)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._ready)
        try:
            line = await reader.readline()
        finally:
            transport.close()
        try:
            return msgspec.json.decode(line, type=ReadyReport) if line else None
        except msgspec.DecodeError:
            return ReadyReport(error=f"it sent {line[:80]!r} instead of a readiness report")

    async def wait(self) -> str:
        """Wait for the end of the child; return a description of how it ended."""
        code = await self._process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    @property
    def has_left(self) -> bool:
        """Whether the child has ended because it was drained."""
        return self._process.returncode == EXIT_DRAINED

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, signum: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signum)


def to_arguments(options: Mapping[str, object]) -> list[str]:
    """Options as arguments: {"run_dir": "/x", "threads": None, "verify": True} -> ["--run-dir", "/x", "--verify"].

    A tuple becomes an option per element.
    """
    arguments: list[str] = []
    for name, value in options.items():
        flag = option_name(name)
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            for each in value if isinstance(value, tuple) else (value,):
                arguments += [f"--{flag}", str(each)]
    return arguments


def _output(log_path: Path | None) -> IO[bytes]:
    """Return the file for a child's output: its log file, or this process's standard error."""
    if log_path is not None:
        return log_path.open("ab")
    return os.fdopen(os.dup(sys.stderr.fileno()), "wb")
