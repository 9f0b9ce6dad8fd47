"""Knows which processes map the node's memory, and tells the master when one has ended.

A process is alive while its connection is open: a process that is stopped for an hour still maps the memory. So no
connection is closed for silence here. A session that registered on several connections, of one process or of several,
ends with the last of them.

A GPU writes on while its process dies. The session of a process that uses one ends GPU_GRACE_S after the kernel has
reported the process's exit, not with the connection, unless the process has said that its copies are over.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from moonpool.base.address import parse_address
from moonpool.base.errors import ConfigError, StaleGeneration
from moonpool.base.metrics import GetMetrics, MetricFamily
from moonpool.base.rpc import AsyncClient, Call, RpcPeer, RpcServer, SilenceLimits
from moonpool.store.messages import SessionsGone
from moonpool.store.messages.session_calls import SERVICE, EndSessions, Join, Leave, Register

_FOR_EVER = SilenceLimits(silence_limit_s=10 * 365 * 86_400.0)
_CALL_TIMEOUT_S = 5.0
GPU_GRACE_S = 1.0  # copies that a dead process had started are over by then


class SessionRegistry:
    """Serves from `await start()` to `await close()`."""

    def __init__(self, address: str, name: str, metrics: Callable[[], Awaitable[list[MetricFamily]]]) -> None:
        self.address = address
        handlers: dict[type[Call[Any]], Callable[[Any, RpcPeer], Any]] = {
            Register: self._register,
            Join: self._join,
            Leave: self._leave,
            EndSessions: lambda call, peer: self._forget_gpu(peer),
            GetMetrics: lambda call, peer: metrics(),
        }
        self._server = RpcServer(SERVICE, handlers, name=name, silence_limits=_FOR_EVER)
        self._sessions_of: dict[RpcPeer, set[int]] = {}
        self._gpu_processes: dict[RpcPeer, int | None] = {}  # pidfds; None: the process cannot be watched
        self._dying: Counter[int] = Counter()  # sessions whose GPU may still write
        self._graces: set[asyncio.Task[None]] = set()
        self._gone: set[int] = set()  # ended sessions that the master does not know of yet
        self._session_ended = asyncio.Event()
        self._closing = False

    async def start(self) -> None:
        """Listen. ConfigError when another process serves the address: a node of this name runs on this machine."""
        folder = os.path.dirname(parse_address(self.address).path)
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}", param="run_dir") from error
        await self._server.listen(self.address)

    async def close(self) -> None:
        """Stop serving. Registered sessions do not count as ended because of it. Idempotent."""
        self._closing = True
        await self._server.close()
        for peer in list(self._gpu_processes):
            self._forget_gpu(peer)
        for grace in self._graces:
            grace.cancel()
        await asyncio.gather(*self._graces, return_exceptions=True)

    def sessions(self) -> list[int]:
        """Return the sessions of living processes."""
        return sorted(set(self._dying).union(*self._sessions_of.values()))

    async def report(self, client: AsyncClient) -> None:
        """Report ended sessions to the master, at once, until the connection is lost. Unreported ones are kept."""
        while True:
            if not self._gone:
                self._session_ended.clear()
                await self._session_ended.wait()
            ended = sorted(self._gone)
            await client.call(SessionsGone(sessions=ended), timeout_s=_CALL_TIMEOUT_S)
            self._gone.difference_update(ended)

    def _register(self, call: Register, peer: RpcPeer) -> None:
        if peer not in self._sessions_of:
            self._sessions_of[peer] = set()
            peer.on_close(lambda: self._on_disconnect(peer))
        self._sessions_of[peer].add(call.session)
        if call.uses_gpu and peer not in self._gpu_processes:
            self._gpu_processes[peer] = _open_pidfd(peer.pid)

    def _join(self, call: Join, peer: RpcPeer) -> None:
        if not any(call.session in sessions for sessions in self._sessions_of.values()):
            raise StaleGeneration("that session is over")
        self._register(Register(session=call.session), peer)

    def _leave(self, call: Leave, peer: RpcPeer) -> None:
        self._sessions_of.get(peer, set()).discard(call.session)
        self._end({call.session})

    def _forget_gpu(self, peer: RpcPeer) -> None:
        pidfd = self._gpu_processes.pop(peer, None)
        if pidfd is not None:
            os.close(pidfd)

    def _on_disconnect(self, peer: RpcPeer) -> None:
        sessions = self._sessions_of.pop(peer)
        if peer not in self._gpu_processes:
            self._end(sessions)
            return
        self._dying.update(sessions)
        grace = asyncio.get_running_loop().create_task(self._end_later(sessions, self._gpu_processes.pop(peer)))
        self._graces.add(grace)
        grace.add_done_callback(self._graces.discard)

    async def _end_later(self, sessions: set[int], pidfd: int | None) -> None:
        """End the sessions of a process with a GPU, unless they are registered again by then."""
        if pidfd is not None:
            try:
                await _readable(pidfd)
            finally:
                os.close(pidfd)
        await asyncio.sleep(GPU_GRACE_S)
        self._dying -= Counter(sessions)
        self._end(sessions - self._dying.keys())

    def _end(self, sessions: set[int]) -> None:
        if not self._closing:
            self._gone |= sessions.difference(*self._sessions_of.values())
            self._session_ended.set()


def _open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process exits; None when it has exited, or is unknown here."""
    try:
        return os.pidfd_open(pid) if pid else None
    except OSError:
        return None


async def _readable(fd: int) -> None:
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(fd)
