"""The asking side of one tcp lane: many requests under way, their answers taken in order.

While the owner works on one run of requests the next is already on its way, so a lane never idles for a round trip.
What is in flight is bounded such that request heads and small answers always fit the sockets' buffers: the two sides
cannot both wait for the other to receive. Every answer is taken off the wire, refusals in the middle included, so the
lane stays in step.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

from moonpool.base.clock import Deadline
from moonpool.base.errors import MoonpoolError, ProtocolError, StaleGeneration
from moonpool.transfer.transports.sockets import TimedSocket, send_all
from moonpool.transfer.transports.tcp.answer_runs import AnswerRun
from moonpool.transfer.transports.tcp.frame_columns import pack_run
from moonpool.transfer.transports.tcp.frames import (
    RESPONSE_NBYTES,
    VERDICT_NBYTES,
    FrameOp,
    FrameStatus,
    ReadVerdict,
    RequestPacker,
    check_body,
    pack_response,
    pack_verdict,
    unpack_error,
    unpack_response,
    unpack_verdict,
)
from moonpool.transfer.transports.tcp.streams import DIRECT_NBYTES, Inbox

# Requests per run; at most two runs are in flight. Their heads are 39 KiB at the very most, and so are in any socket.
_RUN = 64
_AHEAD_NBYTES = 16 * 1024 * 1024
_MERGED_NBYTES = 8 * 1024 * 1024
_MERGED_ITEMS = 512


class PipelinedRequest(NamedTuple):
    """One request: the place in the segment and the caller's memory, `nbytes` in all. `generation` is what a write
    stamps, or what a read expects to find (0: anything).
    """

    offset: int
    nbytes: int
    views: list[memoryview]
    generation: int = 0


class PipelineTarget(NamedTuple):
    """The segment that all requests are about."""

    name: str
    incarnation: int


class RequestRun(NamedTuple):
    """Orders that are sent together."""

    orders: Sequence[PipelinedRequest]
    is_last: bool  # of its batch


def merge_neighbours(items: Iterable[tuple[int, memoryview]], generation: int = 0) -> list[PipelinedRequest]:
    """One request for items that follow each other in the segment: what is said and done per request takes as long as
    moving some 100 KiB. Not without limit: a request is refused as a whole.
    """
    return merge_alike([(offset, view, generation) for offset, view in items])


def merge_alike(items: Iterable[tuple[int, memoryview, int]]) -> list[PipelinedRequest]:
    """As merge_neighbours(), of neighbours with the same generation each. The items of an order follow each other."""
    orders: list[PipelinedRequest] = []
    end, nbytes, views, last = -1, 0, list[memoryview](), -1
    for offset, view, generation in items:
        here = view.nbytes
        is_alike = offset == end and generation == last and nbytes + here <= _MERGED_NBYTES
        if is_alike and len(views) < _MERGED_ITEMS:
            views.append(view)
            nbytes += here
            orders[-1] = PipelinedRequest(offset + here - nbytes, nbytes, views, generation)
        else:
            nbytes, views, last = here, [view], generation
            orders.append(PipelinedRequest(offset, here, views, generation))
        end = offset + here
    return orders


def cut_runs(orders: Sequence[PipelinedRequest]) -> Iterator[RequestRun]:
    """All of a batch, be it empty."""
    for start in range(0, max(len(orders), 1), _RUN):
        yield RequestRun(orders[start : start + _RUN], start + _RUN >= len(orders))


class Pipeline:
    """The requests of one caller, on a lane that no other uses. Ids start at 0: no answer is left on the lane."""

    def __init__(self, sock: socket.socket, op: FrameOp, target: PipelineTarget, deadline: Deadline) -> None:
        self._sock = sock
        self._op = op
        self._packer = RequestPacker(*target)
        self._deadline = deadline
        self._num_sent = self._num_answered = 0
        self._nbytes_ahead = 0  # asked for and not here yet
        self._inbox: Inbox | None = None
        self.refusals: dict[int, MoonpoolError] = {}  # by the order's position among all

    def run(self, orders: Sequence[PipelinedRequest]) -> MoonpoolError | None:
        """The first refusal, when every order is answered. Raises when the lane is of no more use."""
        for _ in self.in_turn([orders], None):
            pass
        return next(iter(self.refusals.values()), None)

    def in_turn(
        self, batches: Iterable[Sequence[PipelinedRequest]], timeout_s: float | None
    ) -> Generator[None, None, None]:
        """Returns to the caller when every order of a batch is answered. Its successor is on its way by then, and has
        `timeout_s` from then on. Raises when the lane is of no more use.
        """
        for run in self._under_way(batches):
            self._receive(run.orders)
            if run.is_last:
                yield
                if timeout_s is not None:
                    self._deadline = Deadline(timeout_s)
        if self._inbox is not None and self._inbox.nbytes:
            raise ProtocolError("the owner sent more than was asked for")

    def _under_way(self, batches: Iterable[Sequence[PipelinedRequest]]) -> Iterator[RequestRun]:
        """Each run when it is to be received: others behind it are on their way, or there are none."""
        rest = (run for orders in batches for run in cut_runs(orders))
        flying: deque[RequestRun] = deque()
        while sent := list(self._next_to_send(rest)):
            flying += sent
            while flying and not self._runs_low():
                yield flying.popleft()
        yield from flying

    def _next_to_send(self, rest: Iterator[RequestRun]) -> Iterator[RequestRun]:
        """Sends what may be on its way now: requests alone in one piece, for each message wakes the owner up."""
        heads: list[bytes] = []  # of each run
        while self._num_sent - self._num_answered <= _RUN and self._nbytes_ahead < _AHEAD_NBYTES:
            run = next(rest, None)
            if run is None:
                break
            if self._op is FrameOp.READ:
                heads.append(self._heads_of(run.orders))
                self._nbytes_ahead += sum([order.nbytes for order in run.orders])
            else:
                self._send_data(run.orders)
            yield run
        if any(heads):
            send_all(self._sock, [b"".join(heads)], self._deadline)

    def _runs_low(self) -> bool:
        """Whether the owner might be without work soon."""
        return self._num_sent - self._num_answered <= _RUN and self._nbytes_ahead <= _AHEAD_NBYTES // 2

    def _heads_of(self, orders: Sequence[PipelinedRequest]) -> bytes:
        """Return the requests without data, one behind the other."""
        if not orders:
            return b""
        first = self._num_sent + 1
        self._num_sent += len(orders)
        offsets, sizes, _, generations = zip(*orders, strict=True)
        return pack_run(self._packer, self._op, first, offsets, sizes, generations)

    def _send_data(self, orders: Sequence[PipelinedRequest]) -> None:
        parts: list[bytes | memoryview] = []
        heads = self._heads_of(orders)
        size = len(heads) // max(len(orders), 1)
        for at, order in enumerate(orders):
            parts.append(heads[at * size : (at + 1) * size])
            parts += order.views
        send_all(self._sock, parts, self._deadline)

    def _receive(self, orders: Sequence[PipelinedRequest]) -> None:
        """Takes the answers to one run."""
        inbox, deadline, reading = self._inbox or self._make_inbox(orders), self._deadline, self._op is FrameOp.READ
        num_taken = self._take_run(inbox, orders) if reading else 0
        for number, order in enumerate(orders[num_taken:], self._num_answered + num_taken + 1):
            inbox.receive(RESPONSE_NBYTES, deadline)
            head, nbytes = inbox.take(RESPONSE_NBYTES), order.nbytes if reading else 0
            if head != pack_response(number, nbytes):
                self.refusals[number - 1] = self._refusal(inbox, number, nbytes, head)
                continue
            verdict_nbytes = VERDICT_NBYTES if reading and order.generation else 0
            if nbytes:
                next_nbytes = verdict_nbytes + (RESPONSE_NBYTES if number < self._num_sent else 0)
                inbox.fill(order.views, next_nbytes, deadline)
                inbox.expect(nbytes)
            if verdict_nbytes:
                self._take_verdict(inbox, number, order)
        self._num_answered += len(orders)
        self._nbytes_ahead -= sum([order.nbytes for order in orders]) if reading else 0

    def _take_run(self, inbox: Inbox, orders: Sequence[PipelinedRequest]) -> int:
        """Take the answers to READs at the start of the run if the run has only small ones, which all expect a
        generation or all none, and nothing has been received yet. Return how many were taken.
        """
        sock = self._sock
        if inbox.nbytes or not orders or type(sock) is not TimedSocket:
            return 0
        _, sizes, views, generations = zip(*orders, strict=True)
        is_mixed = min(generations) == 0 < max(generations)
        if is_mixed or max(sizes) >= DIRECT_NBYTES or set(map(len, views)) != {1}:
            return 0
        run = AnswerRun(self._num_answered + 1, sizes, [view for (view,) in views], generations[0] > 0)
        count, rest = run.receive(sock, self._deadline)
        inbox.give_back(rest)
        return count

    def _take_verdict(self, inbox: Inbox, number: int, order: PipelinedRequest) -> None:
        inbox.receive(VERDICT_NBYTES, self._deadline)
        frame = inbox.take(VERDICT_NBYTES)
        if frame != pack_verdict(number, ReadVerdict.SAME) and unpack_verdict(frame, number) is ReadVerdict.STALE:
            self.refusals[number - 1] = StaleGeneration(
                f"space at offset {order.offset} was given away while generation {order.generation} of it was read"
            )

    def _make_inbox(self, orders: Sequence[PipelinedRequest]) -> Inbox:
        # Large data goes past the inbox; room for it would have to be allocated each time.
        small = [RESPONSE_NBYTES + order.nbytes + VERDICT_NBYTES for order in orders if order.nbytes < DIRECT_NBYTES]
        self._inbox = inbox = Inbox(self._sock, sum(small) if self._op is FrameOp.READ else 0)
        if self._op is FrameOp.READ and orders:
            inbox.expect(orders[0].nbytes)
        return inbox

    def _refusal(self, inbox: Inbox, number: int, nbytes: int, head: memoryview) -> MoonpoolError:
        """The error in an answer that is no success; ProtocolError when it is no answer to this order at all."""
        response = unpack_response(head)
        if response.status is not FrameStatus.ERROR or response.request_id not in (number, 0):
            raise ProtocolError(
                f"the owner answered request {response.request_id} with {response.nbytes} bytes, "
                f"expected were {nbytes} for request {number}"
            )
        inbox.receive(response.nbytes, self._deadline)
        error = unpack_error(check_body(bytes(inbox.take(response.nbytes)), response.checksum))
        if response.request_id == 0:
            raise error
        return error
