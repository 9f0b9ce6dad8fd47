"""The asking side of one tcp lane: many requests under way, their answers taken in order.

While the owner works on one run of requests the next is already on its way, so a lane never idles for a round trip.
What is in flight is bounded such that request heads and small answers always fit the sockets' buffers: the two sides
cannot both wait for the other to receive. Every answer is taken off the wire, refusals in the middle included, so
the lane stays in step.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple

from moonpool.base.clock import Deadline
from moonpool.base.errors import MoonpoolError, ProtocolError
from moonpool.transfer.transports.sockets import send_all
from moonpool.transfer.transports.tcp.frames import (
    RESPONSE_NBYTES,
    Op,
    Status,
    pack_response,
    unpack_error,
    unpack_response,
)
from moonpool.transfer.transports.tcp.streams import DIRECT_NBYTES, Inbox

# Requests per run; at most two runs are in flight. Their heads are 38 KiB at the very most, and so are in any socket.
_RUN = 64


class Order(NamedTuple):
    """One request: the place in the segment and the caller's memory, `nbytes` in all."""

    offset: int
    nbytes: int
    views: list[memoryview]


class Pipeline:
    """All orders of one caller, on a lane that is its own. The ids start anew, as no answer is left on the lane."""

    def __init__(
        self, sock: socket.socket, op: Op, heads: Sequence[bytes], orders: Sequence[Order], deadline: Deadline
    ) -> None:
        self._sock = sock
        self._op = op
        self._heads = heads
        self._orders = orders
        self._deadline = deadline
        # Large data goes past the inbox; room for it would have to be taken from the system anew each time.
        small = [RESPONSE_NBYTES + order.nbytes for order in orders if order.nbytes < DIRECT_NBYTES]
        self._inbox = Inbox(sock, sum(small) if op is Op.READ else 0)
        if op is Op.READ and orders:
            self._inbox.expect(orders[0].nbytes)

    def run(self) -> MoonpoolError | None:
        """The first refusal, when every order is answered. Raises when the lane is of no more use."""
        refusal: MoonpoolError | None = None
        for start in range(0, len(self._orders) + _RUN, _RUN):
            self._send(start)
            if start:
                found = self._receive(start - _RUN)
                refusal = refusal or found
        if self._inbox.nbytes:
            raise ProtocolError("the owner sent more than was asked for")
        return refusal

    def _send(self, start: int) -> None:
        heads = self._heads[start : start + _RUN]
        if self._op is Op.READ:
            send_all(self._sock, [b"".join(heads)], self._deadline)
            return
        parts: list[bytes | memoryview] = []
        for head, order in zip(heads, self._orders[start : start + _RUN], strict=True):
            parts.append(head)
            parts += order.views
        send_all(self._sock, parts, self._deadline)

    def _receive(self, start: int) -> MoonpoolError | None:
        """Takes the answers to one run; the first refusal among them."""
        refusal: MoonpoolError | None = None
        inbox, deadline, reading = self._inbox, self._deadline, self._op is Op.READ
        for number, order in enumerate(self._orders[start : start + _RUN], start + 1):
            inbox.receive(RESPONSE_NBYTES, deadline)
            head, nbytes = inbox.take(RESPONSE_NBYTES), order.nbytes if reading else 0
            if head != pack_response(number, nbytes):
                error = self._refusal(head, number, nbytes)
                refusal = refusal or error
            elif nbytes:
                inbox.fill(order.views, RESPONSE_NBYTES if number < len(self._orders) else 0, deadline)
                inbox.expect(nbytes)
        return refusal

    def _refusal(self, head: memoryview, number: int, nbytes: int) -> MoonpoolError:
        """The error in an answer that is no success; ProtocolError when it is no answer to this order at all."""
        response = unpack_response(head)
        if response.status is not Status.ERROR or response.request_id not in (number, 0):
            raise ProtocolError(
                f"the owner answered request {response.request_id} with {response.nbytes} bytes, "
                f"expected were {nbytes} for request {number}"
            )
        self._inbox.receive(response.nbytes, self._deadline)
        error = unpack_error(self._inbox.take(response.nbytes))
        if response.request_id == 0:
            raise error
        return error
