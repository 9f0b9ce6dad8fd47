"""One child process of the launcher: `python -m moonpool ROLE --option value ...`, the same as typed by hand, except
that it is forked from a template that has imported the role (template.py).

It runs in its own session, so that Ctrl-C reaches the launcher alone. It inherits the read end of the lifeline and a
pipe on which it reports {"ready": address} or {"error": message} (base/process.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from moonpool.base.config import option_name
from moonpool.base.process import EXIT_DRAINED, EXIT_HANGS, EXIT_UNREACHABLE, Lifeline, ReadyReport
from moonpool.launch.role_settings import child_environment
from moonpool.launch.template import Template

_MAX_REPORT_NBYTES = 64 * 1024


class Child:
    """Await `start(...)`, `report()`, then `wait()`. It may be signalled at any time: before the process is there, the
    signal waits for it."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._status: int | None = None  # its exit code, or the number of the signal that ended it, negated
        self._signal: signal.Signals | None = None
        self._ready: IO[bytes] | None = None

    async def start(
        self,
        template: Template,
        command: str,
        options: Mapping[str, object],
        lifeline: Lifeline,
        log_path: Path | None,
    ) -> None:
        """Raise OSError if the process cannot be started."""
        environment = child_environment(options, os.environ)
        read_fd, write_fd = os.pipe()
        self._ready = os.fdopen(read_fd, "rb", buffering=0)
        try:
            with _output(log_path) as output:
                fds = (output.fileno(), write_fd, lifeline.fd)
                self._pid = await template.fork(command, to_arguments(options), environment, fds)
        except BaseException:
            self._ready.close()
            raise
        finally:
            os.close(write_fd)
        if self._signal is not None:
            os.kill(self._pid, self._signal)

    async def report(self) -> ReadyReport | None:
        """Return the child's report; None if the child ended without one. Call once."""
        assert self._ready is not None, "it was started"
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
        assert self._pid is not None, "it was started"
        await _end_of(self._pid)
        _, status = os.waitpid(self._pid, 0)  # noqa: ASYNC222 - it has ended
        code = self._status = os.waitstatus_to_exitcode(status)
        if code == EXIT_UNREACHABLE:
            return "a socket of it was removed or replaced"
        if code == EXIT_HANGS:
            return "its engine hung"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    @property
    def has_left(self) -> bool:
        """Whether the child has ended because it was drained."""
        return self._status == EXIT_DRAINED

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, signum: signal.Signals) -> None:
        self._signal = signum
        if self._pid is not None and self._status is None:  # until wait() the number is no other process's
            os.kill(self._pid, signum)


async def _end_of(pid: int) -> None:
    loop, fd = asyncio.get_running_loop(), os.pidfd_open(pid)
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


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
