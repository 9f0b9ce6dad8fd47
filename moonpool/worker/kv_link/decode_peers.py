"""Connections of a prefill worker to the decode workers that it hands over to: one each, for all of its hand-offs.

Any number of calls are under way on a connection, so no hand-off waits for the answer to another one. Calls are made
from the threads that send KV; the worker's event loop carries them, and sends those of one thread in their order.
"""

from __future__ import annotations

import asyncio
import logging
import math
from concurrent.futures import Future

from moonpool.base.cluster import REQUEST_LIMITS, WORKER_SERVICE
from moonpool.base.errors import DeadlineExceeded, PeerLost
from moonpool.base.log import RateLimitedLog
from moonpool.base.rpc import AsyncClient, Call

_LOG = logging.getLogger(__name__)
HANDOFF_TIMEOUT_S = 10.0  # for one call, and for a batch of pieces beyond what its bytes take


class DecodePeers:
    """`events` is the loop that carries the calls. Any thread may call and close."""

    def __init__(self, name: str, events: asyncio.AbstractEventLoop) -> None:
        self._name, self._events = name, events
        self._closed = False
        self._clients: dict[str, asyncio.Task[AsyncClient]] = {}
        self.refusal_log = RateLimitedLog(_LOG, interval_s=math.inf)  # a refusal lasts until a setting changes

    def open(self, address: str, call: Call[None]) -> Future[AsyncClient]:
        """Make the first call of a hand-off. Return a future of the connection that has carried it: the decode worker
        knows the writer by it, so it has to carry the other calls too. A connection that has died since the last
        hand-off is replaced."""
        return asyncio.run_coroutine_threadsafe(self._open(address, call), self._events)

    def call(self, client: AsyncClient, call: Call[None]) -> Future[None]:
        """Make a call over the connection that open() has returned; return a future of its outcome."""
        return asyncio.run_coroutine_threadsafe(client.call(call, timeout_s=HANDOFF_TIMEOUT_S), self._events)

    def send(self, client: AsyncClient, call: Call[None]) -> None:
        """Make a call without an answer. If it does not arrive, the connection has ended."""
        self._events.call_soon_threadsafe(client.send, call)

    def close(self) -> None:
        """Idempotent. Calls that wait for an answer get PeerLost; there are no new connections afterwards."""
        if not self._closed:
            self._closed = True
            self._events.call_soon_threadsafe(self._close_all)

    # on the event loop

    async def _open(self, address: str, call: Call[None]) -> AsyncClient:
        client = await self._connected(address)
        try:
            await client.call(call, timeout_s=HANDOFF_TIMEOUT_S)
        except DeadlineExceeded:
            client.close()  # the decode worker may take the call later: this takes it back
            raise
        except PeerLost:
            client = await self._connected(address, instead_of=client)
            await client.call(call, timeout_s=HANDOFF_TIMEOUT_S)
        return client

    async def _connected(self, address: str, instead_of: AsyncClient | None = None) -> AsyncClient:
        """Return the connection, which may be lost by now. Make one if there is none, if it is known to be lost, or if
        it is `instead_of`."""
        if self._closed:
            raise PeerLost("this worker is shutting down")
        task = self._clients.get(address)
        if task is None or (task.done() and _is_lost(task, instead_of)):
            task = self._clients[address] = self._events.create_task(self._connect(address))
        try:
            return await asyncio.shield(task)  # others wait for it too
        except asyncio.CancelledError:
            if task.cancelled():
                raise PeerLost("this worker is shutting down") from None
            raise

    async def _connect(self, address: str) -> AsyncClient:
        # The decode worker keeps pages for as long as this process may write to them. While it stands still it may be
        # in the middle of a write, so its silence must not end the connection.
        client = await AsyncClient.connect(
            address, WORKER_SERVICE, name=self._name, silence_limits=REQUEST_LIMITS, may_stand_still=True
        )
        if self._closed:
            client.close()
        return client

    def _close_all(self) -> None:
        for task in self._clients.values():
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None:
                task.result().close()


def _is_lost(connecting: asyncio.Task[AsyncClient], instead_of: AsyncClient | None) -> bool:
    if connecting.cancelled() or connecting.exception() is not None:
        return True
    return connecting.result() is instead_of or connecting.result().closed.is_set()
