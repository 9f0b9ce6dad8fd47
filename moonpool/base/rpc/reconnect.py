"""A connection that is made again whenever it is lost, and the tasks that run on it.

While no connection can be made, the log says so once, after SAY_AFTER_S, and names the address.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from moonpool.base.backoff import Backoff
from moonpool.base.errors import DeadlineExceeded, MoonpoolError, PeerLost, Unavailable
from moonpool.base.rpc.aio_client import AsyncClient
from moonpool.base.rpc.protocol import Call
from moonpool.base.rpc.silence import DEFAULT_SILENCE_LIMITS, SilenceLimits

_GRACE_S = 1.0
SAY_AFTER_S = 1.0  # a server that is started again, or at the same time as this process, is there before that
_LOG = logging.getLogger(__name__)

R = TypeVar("R")
Duty = Callable[[AsyncClient], Awaitable[None]]


class ReconnectingClient:
    """Connects, runs every duty on the connection until it is lost, pauses and connects again.

    A duty that returns, or that raises a MoonpoolError, ends the connection: all duties are cancelled, and `on_lost` is
    called with the error and True. It is called with False when no connection could be made. Any other exception of a
    duty ends run(). The owner resets `backoff` when it finds that the connection works.
    """

    def __init__(
        self,
        address: str,
        service: str,
        duties: Sequence[Duty],
        *,
        name: str,
        incarnation: int = 0,
        backoff: Backoff,
        on_lost: Callable[[MoonpoolError, bool], None],
        silence_limits: SilenceLimits = DEFAULT_SILENCE_LIMITS,
    ) -> None:
        self.backoff = backoff
        self._silence_limits = silence_limits
        self._address, self._service = address, service
        self._name, self._incarnation = name, incarnation
        self._duties = duties
        self._on_lost = on_lost
        self._client: AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._away_since_s: float | None = None  # since when connections fail
        self._has_said = False

    @property
    def client(self) -> AsyncClient | None:
        """The connection, or None while there is none."""
        return None if self._client is None or self._client.closed.is_set() else self._client

    async def run(self) -> NoReturn:
        """Run until cancelled. The owner may still use the connection then, and closes it with close()."""
        self._loop, task = asyncio.get_running_loop(), asyncio.current_task()
        while True:
            self._client = None
            try:
                self._client = await AsyncClient.connect(
                    self._address,
                    self._service,
                    name=self._name,
                    incarnation=self._incarnation,
                    silence_limits=self._silence_limits,
                )
                self._reached()
                # In a task of its own: a task group cancels its task, and `task` is cancelled by its owner only.
                await asyncio.create_task(self._run_duties(self._client))
            except MoonpoolError as error:
                if task is not None and task.cancelling():  # a duty failed while it was being cancelled
                    raise asyncio.CancelledError from error
                if self._client is None:
                    self._not_reached(error)
                self._on_lost(error, self._client is not None)
            self.close()
            await asyncio.sleep(self.backoff.next_s())

    def close(self) -> None:
        """Close the connection, if there is one. Idempotent."""
        if self._client is not None:
            self._client.close()

    def call_from_thread(self, call: Call[R], *, timeout_s: float) -> R:
        """Make a call from a thread other than the event loop's. PeerLost while there is no connection."""
        client = self.client
        if client is None or self._loop is None:
            raise PeerLost(f"{self._address} is not connected")
        future = asyncio.run_coroutine_threadsafe(client.call(call, timeout_s=timeout_s), self._loop)
        try:
            return future.result(timeout_s + _GRACE_S)
        except TimeoutError as error:  # the loop is busy, or was stopped
            raise DeadlineExceeded(f"{self._address} was not asked in time") from error

    def _not_reached(self, error: MoonpoolError) -> None:
        now_s = time.monotonic()
        if self._away_since_s is None:
            self._away_since_s = now_s
        if not self._has_said and now_s - self._away_since_s >= SAY_AFTER_S:
            self._has_said = True
            _LOG.warning("%s: no connection to service %s: %s; it is tried again", self._name, self._service, error)

    def _reached(self) -> None:
        if self._has_said and self._away_since_s is not None:
            away_s = time.monotonic() - self._away_since_s
            _LOG.info("%s: connected to %s after %.1f s", self._name, self._address, away_s)
        self._away_since_s, self._has_said = None, False

    async def _run_duties(self, client: AsyncClient) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for duty in self._duties:
                    tasks.create_task(_run_then_close(duty, client))
                tasks.create_task(_wait_lost(client))
        except BaseExceptionGroup as group:
            raise _worst(group) from group


async def _run_then_close(duty: Duty, client: AsyncClient) -> None:
    await duty(client)
    client.close()


async def _wait_lost(client: AsyncClient) -> NoReturn:
    await client.closed.wait()
    raise PeerLost(f"{client.address} closed the connection")


def _worst(group: BaseExceptionGroup[Any]) -> BaseException:
    """Return an error that is more than an outage, if there is one; otherwise the first error."""
    errors = list(_leaves(group))
    return next((error for error in errors if not isinstance(error, Unavailable)), errors[0])


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
