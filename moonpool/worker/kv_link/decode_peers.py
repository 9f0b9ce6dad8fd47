"""Connections of a prefill worker to the decode workers that it hands over to."""

from __future__ import annotations

import logging
import math

from moonpool.base.cluster import WORKER_SERVICE
from moonpool.base.errors import PeerLost
from moonpool.base.log import RateLimitedLog
from moonpool.base.rpc import BlockingClient, Call

_LOG = logging.getLogger(__name__)
HANDOFF_TIMEOUT_S = 10.0  # for one call, and for a batch of pieces beyond what its bytes take


class DecodePeers:
    """Connections to decode workers, one each, for the hand-off thread of that worker; any thread may close them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._closed = False
        self._clients: dict[str, BlockingClient] = {}
        self.refusal_log = RateLimitedLog(_LOG, interval_s=math.inf)  # a refusal lasts until a setting changes

    def get(self, address: str) -> BlockingClient:
        if self._closed:
            raise PeerLost("this worker is shutting down")
        if address not in self._clients:
            self._clients[address] = BlockingClient(address, WORKER_SERVICE, name=self._name)
        return self._clients[address]

    def reach(self, address: str, call: Call[None]) -> None:
        """Make the first call of a hand-off. A connection that has died since the last one is replaced."""
        try:
            self.get(address).call(call, timeout_s=HANDOFF_TIMEOUT_S)
        except PeerLost:
            self.get(address).call(call, timeout_s=HANDOFF_TIMEOUT_S)

    def close(self) -> None:
        """Idempotent. A thread that waits for an answer gets PeerLost; there are no new connections afterwards."""
        self._closed = True
        for client in list(self._clients.values()):
            client.close()
