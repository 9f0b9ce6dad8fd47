"""The connection to the master: made again whenever it is lost, with all that the node does beside it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

from moonpool.base.errors import DeadlineExceeded, MoonpoolError, PeerLost, Unavailable
from moonpool.base.rpc import AsyncClient, Call
from moonpool.store.messages import SERVICE

_LOG = logging.getLogger(__name__)
_GRACE_S = 1.0

R = TypeVar("R")
Duty = Callable[[AsyncClient], Awaitable[None]]


class MasterLink:
    """Every duty gets the connection and runs until it is lost; then all are cancelled, and begun anew with the next
    one. So they are when one of them fails with an error of ours: what this node holds must outlive a master's mistake.
    """

    def __init__(self, address: str, name: str, retry_s: float, duties: Sequence[Duty]) -> None:
        self._address = address
        self._name = name
        self._retry_s = retry_s
        self._duties = duties
        self._client: AsyncClient | None = None
        self._loop = asyncio.get_running_loop()
        self.failure: MoonpoolError | None = None  # why there is no connection, or was none last

    @property
    def client(self) -> AsyncClient | None:
        """The connection, if there is one."""
        return None if self._client is None or self._client.closed.is_set() else self._client

    async def attend_forever(self) -> None:
        was_there = False
        while True:
            try:
                self._client = await AsyncClient.connect(self._address, SERVICE, name=self._name)
                was_there = True
                await self._attend(self._client)
            except MoonpoolError as error:
                if was_there:  # once per outage
                    _LOG.warning("%s: no dealings with the master for now: %s", self._name, error)
                was_there, self.failure = False, error
            if self._client is not None:
                self._client.close()
            await asyncio.sleep(self._retry_s)

    def call_from_thread(self, call: Call[R], *, timeout_s: float) -> R:
        """For threads of this process other than the loop's."""
        client = self.client
        if client is None:
            raise PeerLost(f"{self._address} is not connected")
        future = asyncio.run_coroutine_threadsafe(client.call(call, timeout_s=timeout_s), self._loop)
        try:
            return future.result(timeout_s + _GRACE_S)
        except TimeoutError as error:  # the loop is busy, or was stopped
            raise DeadlineExceeded(f"{self._address} was not asked in time") from error

    async def _attend(self, client: AsyncClient) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for duty in (*self._duties, _until_lost):
                    tasks.create_task(_as_coroutine(duty, client))
        except BaseExceptionGroup as group:
            raise _worst(group) from group


async def _until_lost(client: AsyncClient) -> NoReturn:
    await client.closed.wait()
    raise PeerLost(f"{client.address} closed the connection")


async def _as_coroutine(duty: Duty, client: AsyncClient) -> None:
    await duty(client)


def _worst(group: BaseExceptionGroup[Any]) -> BaseException:
    """An error that is no outage, if there is one."""
    leaves = list(_leaves(group))
    return next((error for error in leaves if not isinstance(error, Unavailable)), leaves[0])


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
