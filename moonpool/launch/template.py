"""The launcher's side of the templates from which it forks its roles (cli/template.py).

There are two: one for workers, which import torch, and one for all other roles, so that these need not wait.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

from moonpool.base.forking import SPACE_FOR_COMMAND_LINE, adopting

_MODULE = "moonpool.cli.template"


class Template:
    """One process, which is started when it is needed and again when it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._turn = asyncio.Lock()

    async def load(self, role: str) -> None:
        """Import the role, so that its first process starts sooner. Do nothing if that is impossible."""
        async with self._turn:
            try:
                await self._load(role, [])
            except OSError:
                self.close()

    async def fork(
        self, role: str, arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]
    ) -> int:
        """Start `moonpool ROLE ARGUMENTS`; `fds`: its output, its end of the ready pipe, and the lifeline. Return the
        number of the process, a child of this one. Raise OSError if it cannot be started."""
        order = json.dumps({"arguments": [role, *arguments], "environment": dict(environment)}).encode()
        async with self._turn:
            try:
                return await self._fork(role, order, fds)
            except ConnectionError:  # the template was killed; the next one is not to blame
                self.close()
                return await self._fork(role, order, fds)

    def close(self) -> None:
        """End the template. The processes that it forked go on. Idempotent."""
        if self._process is not None and self._socket is not None:
            self._socket.close()
            self._process.kill()
            self._process.wait()
            self._process = self._socket = None

    async def _fork(self, role: str, order: bytes, fds: Sequence[int]) -> int:
        read_fd, write_fd = os.pipe()
        with os.fdopen(write_fd, "wb") as there:
            try:
                template = await self._load(role, [read_fd, *fds])
            finally:
                os.close(read_fd)
            return await asyncio.to_thread(_adopt_one, template, order, there)

    async def _load(self, role: str, fds: Sequence[int]) -> socket.socket:
        there = self._socket or self._start()
        socket.send_fds(there, [role.encode()], fds)
        if not await asyncio.get_running_loop().sock_recv(there, 64):
            raise _ended()
        return there

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno()), SPACE_FOR_COMMAND_LINE],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # it must have no thread when it forks
                start_new_session=True,  # Ctrl-C reaches the launcher alone
            )
        self._socket = ours
        return ours


def _adopt_one(template: socket.socket, order: bytes, there: IO[bytes]) -> int:
    """Let the template fork, and tell the new process what it is. This takes some milliseconds. A process whose number
    was lost with the template is told nothing, and ends."""
    with adopting():
        template.send(b"fork")
        select.select([template], [], [])
        pid = int(template.recv(64) or b"0")
    if pid == 0:
        raise _ended()
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid))
    with suppress(BrokenPipeError):  # it was killed; its parent will see that
        there.write(order)
        there.flush()
    return pid


def _ended() -> ConnectionResetError:
    return ConnectionResetError(errno.ECONNRESET, "the process that forks roles has ended")
