"""Pages -> a decode worker's reserved pages and -> the pool, piece by piece as layers finish.

The hand-off is what a client waits for; what goes to the pool is for the next request. So a failed put is
counted and forgotten, while a failed hand-off fails the request's attempt. Pieces may be sent again (a sequence that
was preempted or rewound computes them again): the last bytes and the last checksum count.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from moonpool.base.checksum import crc32c
from moonpool.base.clock import Clock, SystemClock
from moonpool.base.cluster import WORKER_SERVICE
from moonpool.base.errors import Cancelled, Internal, MoonpoolError, PeerLost, Unauthorized, Unavailable
from moonpool.base.keys import object_key
from moonpool.base.log import RateLimitedLog
from moonpool.base.object_header import ObjectKind
from moonpool.base.rpc import BlockingClient, Call
from moonpool.store.client import StoreClient
from moonpool.store.client.put_request import PutRequest
from moonpool.store.client.put_session import PutSession
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.transports.base import RemoteSegment
from moonpool.worker.kv_link.outbox import SendQueue, Urgency
from moonpool.worker.kv_link.pieces import PieceMemory
from moonpool.worker.kv_link.pool_health import PoolHealth
from moonpool.worker.messages import AbortHandoff, CommitHandoff, OpenHandoff, Ticket, TokenOut

_LOG = logging.getLogger(__name__)

_HANDOFF_TIMEOUT_S = 10.0
_KEEP_EVERY_S = 5.0  # well within the time after which the pool discards an unfinished put


class PoolWriter:
    """Puts blocks into the pool, from the outbox's thread. What cannot be put is counted by its error's code."""

    def __init__(
        self, store: StoreClient, memory: PieceMemory, identity: bytes, health: PoolHealth | None = None
    ) -> None:
        self._store = store
        self._memory = memory
        self._identity = identity
        self._health = health or PoolHealth()
        self.failures: Counter[str] = Counter()

    def begin(self, keys: Sequence[bytes], parents: Mapping[bytes, bytes]) -> dict[bytes, PutSession]:
        """Sessions for the blocks that the pool does not have and has room for. `parents` says which block each one
        continues, so that the pool evicts a conversation from its end.
        """
        if self._health.rests:
            self.failures[Unavailable.code] += len(keys)
            return {}
        layout = self._memory.layout
        requests = [
            PutRequest(
                key=object_key(key),
                piece_nbytes=(layout.piece_nbytes,) * layout.num_layers,
                kind=ObjectKind.BLOCK,
                identity=self._identity,
                valid_tokens=layout.block_tokens,
                parent=object_key(parents[key]) if key in parents else b"",
            )
            for key in keys
        ]
        try:
            outcomes = self._store.begin_puts(requests)
        except MoonpoolError as error:
            self._health.note(error)
            self.failures[error.code] += len(keys)
            return {}
        self.failures.update(o.code for o in outcomes if isinstance(o, MoonpoolError) and o.code != "already_exists")
        return {key: o for key, o in zip(keys, outcomes, strict=True) if isinstance(o, PutSession)}

    def write(self, session: PutSession, page: int, layer: int, checksum: int | None = None) -> None:
        """Raises what the session raises, and Unavailable at once while the pool rests."""
        if self._health.rests:
            raise Unavailable("the pool did not answer in time a moment ago")
        try:
            session.write_piece(layer, self._memory.read(page, layer), checksum)
        except MoonpoolError as error:
            self._health.note(error)
            raise

    def keep(self, sessions: Sequence[PutSession]) -> None:
        """A prompt may take longer to compute than the pool waits for a put: its sessions are still meant."""
        try:
            self._store.renew_puts(sessions)
        except MoonpoolError as error:  # a put that was discarded says so when it ends
            self._health.note(error)

    def finish(self, sessions: Sequence[PutSession]) -> None:
        try:
            outcomes = self._store.finish_puts(sessions)
            self.failures.update(o.code for o in outcomes if o is not None)
        except MoonpoolError as error:
            self._health.note(error)
            self.failures[error.code] += len(sessions)

    def abort(self, sessions: Sequence[PutSession]) -> None:
        try:
            self._store.abort_puts(sessions)
        except MoonpoolError as error:  # the master forgets them by itself after a while
            self.failures[error.code] += len(sessions)

    def put_page(self, key: bytes, page: int, parent: bytes | None = None) -> None:
        """The whole block at once, for blocks that decoding completed. `parent` is the key of the one before it."""
        for session in self.begin([key], {} if parent is None else {key: parent}).values():
            try:
                for layer in range(self._memory.layout.num_layers):
                    self.write(session, page, layer)
            except MoonpoolError as error:
                self.failures[error.code] += 1
                self.abort([session])
            else:
                self.finish([session])


class DecodePeers:
    """Connections to decode workers, one each, for the outbox's thread alone; any thread may close them."""

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
        """The first call of a hand-off. A connection that has died since the last one is made anew."""
        try:
            self.get(address).call(call, timeout_s=_HANDOFF_TIMEOUT_S)
        except PeerLost:
            self.get(address).call(call, timeout_s=_HANDOFF_TIMEOUT_S)

    def close(self) -> None:
        """Idempotent. Wakes who waits for an answer; there are no new connections afterwards."""
        self._closed = True
        for client in list(self._clients.values()):
            client.close()


class Push:
    """One prompt's KV on its way out. The engine's and the puller's threads call; the outbox's thread works."""

    def __init__(
        self,
        ticket: Ticket,
        keys: Sequence[bytes],
        *,
        outbox: SendQueue,
        memory: PieceMemory,
        pool: PoolWriter,
        peers: DecodePeers,
        transfer: TransferEngine,
        clock: Clock | None = None,
    ) -> None:
        self._ticket = ticket
        self._keys = list(keys)  # of the full blocks
        self._outbox, self._memory, self._pool = outbox, memory, pool
        self._peers, self._transfer = peers, transfer
        # The decode worker's pages look like ours, but it may have more or fewer of them.
        num_pages = ticket.segment.nbytes // memory.layout.page_nbytes
        self._remote_layout = replace(memory.layout, num_pages=num_pages)
        self._pages: Sequence[int] = ()
        self._remote: RemoteSegment | None = None
        self._opened = False
        self._sessions: dict[bytes, PutSession] | None = None
        self._clock = clock or SystemClock()
        self._kept_s = 0.0
        self._checksums = np.zeros((len(ticket.pages), memory.layout.num_layers), dtype="<u4")
        self._sent = np.zeros(self._checksums.shape, dtype=bool)
        self._failure: MoonpoolError | None = None
        self.sent_nbytes = 0

    # called while the prompt is computed

    def begin(self, pages: Sequence[int], num_ready_blocks: int, num_pulled_blocks: int) -> None:
        """The sequence has its pages; the first `num_ready_blocks` are complete, the next ones are being pulled."""
        self._pages = tuple(pages[: len(self._ticket.pages)])
        wanted = self._keys[:num_ready_blocks] + self._keys[num_ready_blocks + num_pulled_blocks :]
        self._outbox.put(Urgency.HANDOFF, self._open)
        self._outbox.put(Urgency.POOL, lambda: self._begin_puts(wanted))
        for layer in range(self._memory.layout.num_layers):
            self.layer_ready(layer, range(num_ready_blocks))

    def layer_ready(self, layer: int, blocks: Sequence[int]) -> None:
        """These blocks' pieces of one layer hold their final bytes."""
        pages = self._pages
        pairs = [(block, pages[block]) for block in blocks if block < len(pages)]
        if pairs:
            self._outbox.put(Urgency.HANDOFF, lambda: self._send(layer, pairs))
            self._outbox.put(Urgency.POOL, lambda: self._put(layer, pairs))

    # called once at the end

    def commit(self, first: TokenOut, num_tokens: int, on_done: Callable[[MoonpoolError | None], None]) -> None:
        """Hands the request over; `on_done` gets the outcome, on the outbox's thread."""
        self._outbox.put(Urgency.HANDOFF, lambda: on_done(self._commit(first, num_tokens)))

    def abort(self) -> None:
        """The request ends here: tells the decode worker that nothing more will be written."""
        self._outbox.put(Urgency.HANDOFF, self._abort)

    def finish_puts(self, *, complete: bool, on_done: Callable[[], None]) -> None:
        """Makes the blocks visible in the pool, or gives their space back; afterwards the pages are not read."""
        self._outbox.put(Urgency.POOL, lambda: self._finish_puts(complete, on_done))

    # on the outbox's thread

    def _open(self) -> None:
        if self._opened or self._failure is not None:
            return
        ticket = self._ticket
        call = OpenHandoff(request_id=ticket.request_id, epoch=ticket.epoch, generation=ticket.generation)
        try:
            self._peers.reach(ticket.address, call)
            self._opened = True
            self._remote = self._transfer.open(ticket.segment)
        except MoonpoolError as error:
            self._failure = self._explain(error)

    def _send(self, layer: int, pairs: Sequence[tuple[int, int]]) -> None:
        ticket = self._ticket
        for block, page in pairs:
            if block < ticket.num_present_blocks or self._failure is not None:
                continue
            assert self._remote is not None
            view = self._memory.read(page, layer)
            offset, nbytes = self._remote_layout.piece(ticket.pages[block], layer)
            try:
                self._checksums[block, layer] = crc32c(view)
                self._remote.write_from(offset, [view], generation=ticket.generation, timeout_s=_HANDOFF_TIMEOUT_S)
            except MoonpoolError as error:
                self._failure = self._explain(error)
            self._sent[block, layer] = True
            self.sent_nbytes += nbytes

    def _explain(self, error: MoonpoolError) -> MoonpoolError:
        """As the front end should see it: a decode worker that does not let us in is no fault of the client's API key,
        and another one may do.
        """
        if not isinstance(error, Unauthorized):
            return error
        message = f"this prefill worker cannot write to the decode worker at {self._ticket.address}: {error}"
        self._peers.refusal_log.warning("%s; its requests fail until this setting is corrected", message, key=message)
        return Unavailable(message)

    def _commit(self, first: TokenOut, num_tokens: int) -> MoonpoolError | None:
        ticket = self._ticket
        if self._failure is None and not self._sent[ticket.num_present_blocks :].all():
            self._failure = Internal(f"request {ticket.request_id}: a piece was never handed over")
        if self._failure is None:
            call = CommitHandoff(
                request_id=ticket.request_id,
                epoch=ticket.epoch,
                generation=ticket.generation,
                first=first,
                num_tokens=num_tokens,
                checksums=self._checksums[ticket.num_present_blocks :].tobytes(),
            )
            try:
                self._peers.get(ticket.address).call(call, timeout_s=_HANDOFF_TIMEOUT_S)
            except MoonpoolError as error:
                self._failure = error
        if self._failure is not None:
            self._abort()
        return self._failure

    def _abort(self) -> None:
        self._failure = self._failure or Cancelled("the hand-off was given up")  # so that nothing is sent any more
        if not self._opened:
            return
        self._opened = False
        ticket = self._ticket
        call = AbortHandoff(request_id=ticket.request_id, epoch=ticket.epoch, generation=ticket.generation)
        # A decode worker that cannot be told sees our connection close, which says the same.
        with contextlib.suppress(MoonpoolError):
            self._peers.get(ticket.address).call(call, timeout_s=_HANDOFF_TIMEOUT_S)

    def _begin_puts(self, keys: Sequence[bytes]) -> None:
        if self._sessions is None:
            parents = dict(zip(self._keys[1:], self._keys, strict=False))  # each block continues the one before it
            self._sessions = self._pool.begin(keys, parents) if keys else {}
            self._kept_s = self._clock.now_s()

    def _put(self, layer: int, pairs: Sequence[tuple[int, int]]) -> None:
        assert self._sessions is not None
        if self._sessions and self._clock.now_s() - self._kept_s >= _KEEP_EVERY_S:
            self._kept_s = self._clock.now_s()
            self._pool.keep(list(self._sessions.values()))
        for block, page in pairs:
            session = self._sessions.get(self._keys[block]) if block < len(self._keys) else None
            if session is None:
                continue
            try:
                self._pool.write(session, page, layer)
            except MoonpoolError as error:
                self._pool.failures[error.code] += 1
                self._pool.abort([session])
                del self._sessions[self._keys[block]]

    def _finish_puts(self, complete: bool, on_done: Callable[[], None]) -> None:
        sessions = list((self._sessions or {}).values())
        if sessions and complete:
            self._pool.finish(sessions)
        elif sessions:
            self._pool.abort(sessions)
        self._sessions = {}
        on_done()
