"""The right to change workers, of which the master gives one conductor a lease at a time.

All conductors ask for it, about once a second. The holder changes roles and drains workers; the others only route. When
the holder dies, or loses the master, another one has the right a few seconds later. What the old holder still says is
refused by the workers, because each assignment carries the number of its lease.
"""

from __future__ import annotations

import asyncio
import logging

from moonpool.base.clock import Clock
from moonpool.base.errors import MoonpoolError
from moonpool.base.rpc import AsyncClient
from moonpool.store.messages import AcquireLease

LEASE = "roles"
LEASE_S = 3.0
_RENEW_S = 1.0
_CALL_TIMEOUT_S = 1.0
_LOG = logging.getLogger(__name__)


class RoleLease:
    """`keep` is a duty on the connection to the master."""

    def __init__(self, holder: str, clock: Clock) -> None:
        self._holder, self._clock = holder, clock
        self._number = 0
        self._until_s = 0.0

    def number(self) -> int | None:
        """Return the number of the lease; None if this conductor does not have it now."""
        return self._number if self._clock.now_s() < self._until_s else None

    async def keep(self, client: AsyncClient) -> None:
        """Ask for the lease again and again, until cancelled. A master that does not answer ends nothing but the
        lease, in time."""
        while True:
            try:
                await self._ask(client)
            except MoonpoolError as error:
                _LOG.debug("asking the master for the lease failed: %s", error)
            await asyncio.sleep(_RENEW_S)

    async def _ask(self, client: AsyncClient) -> None:
        asked_s = self._clock.now_s()  # before the call: the master counts from a later moment
        call = AcquireLease(name=LEASE, holder=self._holder, ttl_s=LEASE_S)
        number = await client.call(call, timeout_s=_CALL_TIMEOUT_S)
        if number and self.number() != number:
            _LOG.info("may change the roles of workers (lease %d)", number)
        if number:
            self._number, self._until_s = number, asked_s + LEASE_S
