"""Connections of the front end to the conductor and the workers, and what the front end knows about the cluster.

There is one connection per process, shared by all requests. A worker that was restarted at its old address is another
process and gets another connection. A lost connection is dropped; the next request makes a new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from moonpool.base.address import split_addresses
from moonpool.base.clock import Clock, SystemClock
from moonpool.base.cluster import CONDUCTOR_SERVICE, FRONTEND_SERVICE, REQUEST_LIMITS, WORKER_SERVICE, WorkerRole
from moonpool.base.errors import MoonpoolError, PeerLost, Unavailable, Unreachable
from moonpool.base.rpc import AsyncClient, Call
from moonpool.conductor.messages import ConductorStatus, Status, WorkerRef, WorkerStatus
from moonpool.store.messages import SERVICE as STORE_SERVICE

STATUS_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 2.0
_REACH_S = 1.5  # of another machine; after the 3 s of silence that came before, a client has waited for less than 5 s
CLOSE_TIMEOUT_S = 0.2
_LOG = logging.getLogger(__name__)
_Key = tuple[str, str, int]
_R = TypeVar("_R")


class Connections:
    """Owns the clients; `close` closes all of them. `siblings` are the addresses of the other front ends that share
    this one's port, by their names; `group` is the same for all of them, and empty if there are no others.

    With several conductors one is in use, `first_conductor` at first, until its connection is lost. Requests that it
    routed are forgotten by it then, so reports about a request go to the one in use.
    """

    def __init__(
        self,
        conductor_address: str,
        master_address: str | None = None,
        siblings: Mapping[str, str] | None = None,
        group: str = "",
        first_conductor: int = 0,
    ) -> None:
        self.siblings = dict(siblings or {})
        self.group = group
        self._conductors = split_addresses(conductor_address)
        self._conductor = first_conductor % len(self._conductors)  # the one in use
        self._master_address = master_address
        self._clients: dict[_Key, asyncio.Task[AsyncClient]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.closed = False

    async def conductor(self) -> AsyncClient:
        """Return a client of the conductor in use; if it is away, of the next one that answers. Raise Unavailable if
        none does; Unreachable only if the machine of none does, so that waiting for a restart is in vain."""
        errors: list[Unavailable] = []
        for _ in self._conductors:
            number = self._conductor
            try:
                return await self.conductor_at(number)
            except Unavailable as error:
                errors.append(error)
                if self._conductor == number:  # another request may have gone on to the next one meanwhile
                    self._conductor = (number + 1) % len(self._conductors)
                if self.closed:
                    break
        raise next((error for error in errors if not isinstance(error, Unreachable)), errors[-1])

    @property
    def num_conductors(self) -> int:
        return len(self._conductors)

    async def conductor_at(self, number: int) -> AsyncClient:
        """Return a client of that conductor."""
        return await self._get((CONDUCTOR_SERVICE, self._conductors[number], 0))

    async def ask_conductors(self, call: Call[_R], timeout_s: float) -> list[_R | None]:
        """Return the answer of each conductor; None of those that gave none."""

        async def ask(number: int) -> _R | None:
            try:
                async with asyncio.timeout(timeout_s):
                    return await (await self.conductor_at(number)).call(call, timeout_s=timeout_s)
            except (Unavailable, TimeoutError):
                return None

        return list(await asyncio.gather(*map(ask, range(self.num_conductors))))

    async def master(self) -> AsyncClient | None:
        """Return a client of the pool's master, for its metrics; None if no master is configured."""
        if self._master_address is None:
            return None
        return await self._get((STORE_SERVICE, self._master_address, 0))

    def connected_worker(self, ref: WorkerRef) -> AsyncClient | None:
        """Return the worker's client if there is a connection; worker() makes one."""
        client = self._open_client((WORKER_SERVICE, ref.address, ref.incarnation))
        is_this = client is not None and client.peer is not None and client.peer.incarnation == ref.incarnation
        return client if is_this and not self.closed else None

    async def worker(self, ref: WorkerRef) -> AsyncClient:
        """Return a client of the worker. Raise PeerLost if it is gone or another incarnation answers at its address."""
        client = await self._get((WORKER_SERVICE, ref.address, ref.incarnation))
        if client.peer is not None and client.peer.incarnation != ref.incarnation:
            client.close()
            raise PeerLost(f"worker {ref.name} was restarted")
        return client

    async def sibling(self, name: str) -> AsyncClient:
        """Return a client of another front end of this port."""
        return await self._get((FRONTEND_SERVICE, self.siblings[name], 0))

    def notify_conductor(self, call: Call[None]) -> None:
        """Send the call in the background. Ignore failures: a conductor that is gone has lost the request's state."""
        conductor = self._open_client((CONDUCTOR_SERVICE, self._conductors[self._conductor], 0))
        if conductor is not None:
            conductor.send(call)  # without a task, which would cost more than the call
            return
        task = asyncio.create_task(self._send(call))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Close all clients; calls that still wait get PeerLost. Idempotent."""
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_TIMEOUT_S)
        await asyncio.sleep(0)  # what notify_conductor() has just sent leaves this process
        self.closed = True
        tasks = list(self._clients.values())
        self._clients.clear()
        for task in tasks:
            task.cancel()
        for made in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(made, AsyncClient):
                made.close()
                await made.closed.wait()

    async def _send(self, call: Call[Any]) -> None:
        try:
            await (await self.conductor()).call(call, timeout_s=_SEND_TIMEOUT_S)
        except MoonpoolError as error:
            _LOG.debug("could not send %s to the conductor: %s", type(call).__name__, error)

    def _open_client(self, key: _Key) -> AsyncClient | None:
        """Return the client if it is connected, without waiting: the common case, several times per request."""
        task = self._clients.get(key)
        if task is None or not task.done() or task.cancelled() or task.exception():
            return None
        client = task.result()
        return None if client.closed.is_set() else client

    async def _get(self, key: _Key) -> AsyncClient:
        if self.closed:
            raise Unavailable("the front end is stopping")
        client = self._open_client(key)
        if client is not None:
            return client
        self._drop_lost()
        task = self._clients.get(key)
        if task is None:
            service, address, _ = key
            connect = AsyncClient.connect(
                address,
                service,
                name="frontend",
                timeout_s=_CONNECT_TIMEOUT_S,
                reach_s=_REACH_S,
                silence_limits=REQUEST_LIMITS,
            )
            task = self._clients[key] = asyncio.create_task(connect)
        # Shielded: a request that is cancelled must not cancel the connect that other requests wait for.
        return await asyncio.shield(task)

    def _drop_lost(self) -> None:
        for key, task in list(self._clients.items()):
            if task.done() and (task.cancelled() or task.exception() or task.result().closed.is_set()):
                del self._clients[key]


@dataclass(frozen=True)
class ClusterView:
    """What all registered workers have in common."""

    identity: bytes
    block_tokens: int
    max_tokens: int  # of one sequence, so that it fits the pages of every worker


class ClusterDirectory:
    """The conductor's list of workers, at most `max_age_s` old."""

    def __init__(self, connections: Connections, *, max_age_s: float = 1.0, clock: Clock | None = None) -> None:
        self._connections = connections
        self._max_age_s = max_age_s
        self._clock = clock or SystemClock()
        self._view: ClusterView | None = None
        self._seen_s = 0.0
        self._left: set[str] = set()

    async def status(self, timeout_s: float = STATUS_TIMEOUT_S) -> ConductorStatus:
        """Return the conductor's present status. `left` also has what a conductor said that was restarted since: a new
        one has never heard of workers that had ended."""
        conductor = await self._connections.conductor()
        status = await conductor.call(Status(), timeout_s=timeout_s)
        self._left = (self._left | set(status.left)) - {worker.info.name for worker in status.workers}
        return msgspec.structs.replace(status, left=tuple(sorted(self._left)))

    async def view(self) -> ClusterView:
        """Return what all workers have in common; while workers restart, what was last known. Raise Unavailable
        before the first workers have registered."""
        now_s = self._clock.now_s()
        if self._view is None or now_s - self._seen_s > self._max_age_s:
            try:
                self._view = _common((await self.status()).workers)
                self._seen_s = now_s
            except Unavailable:
                if self._view is None:
                    raise
        return self._view


def missing_roles(workers: tuple[WorkerStatus, ...]) -> list[str]:
    """Return the roles that have no registered worker."""
    present = {worker.info.role for worker in workers}
    return [role.value for role in WorkerRole if role not in present]


def _common(workers: tuple[WorkerStatus, ...]) -> ClusterView:
    missing = missing_roles(workers)
    if missing:
        raise Unavailable(f"no {' and no '.join(missing)} worker is registered")
    info = workers[0].info  # the conductor registers only workers that agree on both
    pages = min(worker.info.num_pages for worker in workers)
    return ClusterView(info.identity, info.block_tokens, pages * info.block_tokens)
