"""Pages -> a decode worker's reserved pages and -> the pool, layer by layer as layers finish.

A client waits for the hand-off; what goes to the pool is for the next request. So a failed put is counted and
forgotten, while a failed hand-off fails the request's attempt. Pieces may be sent again (a sequence that was preempted
or rewound computes them again): the last bytes and the last checksum count.

All pieces of a layer that are ready go to the decode worker as one batch of the transfer engine, and several batches
are under way at once, so that the link does not idle between layers. Layers that became ready while others were being
sent go together: a batch costs several round trips whatever its size, and with many prompts at once they add up.

Calls to the decode worker are not waited for: while one hand-off is opened or committed, others are sent, opened and
committed. The calls of one hand-off follow each other, and its pieces are written between the first answer and the last
call.

A stage of a pipeline sends its own layers alone (`layers`), and nothing to the pool while it computes. All stages but
one end with end_writes(); that one gets the checksums of the others and commits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.errors import Cancelled, Internal, MoonpoolError, Unauthorized, Unavailable
from moonpool.base.rpc import AsyncClient
from moonpool.store.client.put_session import PutSession
from moonpool.transfer import Pending, Priority, RemoteSegment, TransferEngine, TransferOp, TransferRequest
from moonpool.transfer.memory.buffers import Memory
from moonpool.transfer.transports.cuda.copy import in_main_memory
from moonpool.worker.kv_link.decode_peers import HANDOFF_TIMEOUT_S, DecodePeers
from moonpool.worker.kv_link.pieces import Checksums, PieceMemory, ReadyPoint
from moonpool.worker.kv_link.pool import PoolWriter
from moonpool.worker.kv_link.send_queue import SendQueue, Urgency
from moonpool.worker.messages import AbortHandoff, CommitHandoff, EndWrites, OpenHandoff, Ticket, TokenOut

T = TypeVar("T")
_SLOWEST_NBYTES_PER_S = 1_000_000  # a hand-off over a slower link fails
_WINDOW_NBYTES = 8 * 1024 * 1024  # under way at once, unless one batch is larger
_GPU_WINDOW_NBYTES = 512 * 1024 * 1024  # between GPUs, where nothing is copied to main memory
_RENEW_EVERY_S = 5.0  # well within the time after which the pool discards an unfinished put


class SpanChecksums(NamedTuple):
    """The crc32c of the pieces of some layers, [block, layer], for the blocks that a ticket wants."""

    layers: range
    checksums: Checksums


class _ReadyPieces(NamedTuple):
    """Pieces that wait for their turn on the hand-off thread."""

    layers: range
    page_of: dict[int, int]  # by block
    ready: ReadyPoint | None
    by_step: bool  # `ready` is a point of the engine's stream, where a later one comes after an earlier one

    def continued_by(self, other: _ReadyPieces) -> bool:
        """Return whether `other` holds the next layers of the same pages, ready at a later point."""
        return (
            self.by_step and other.by_step and other.layers.start == self.layers.stop and other.page_of == self.page_of
        )


class _SentBatch(NamedTuple):
    """Pieces of some layers on their way to the decode worker."""

    transfer: Pending[None]
    layers: range
    blocks: frozenset[int]
    nbytes: int


class Push:
    """One prompt's KV on its way out. The engine's and the puller's threads call; the SendQueue's threads work."""

    def __init__(
        self,
        ticket: Ticket,
        keys: Sequence[bytes],
        *,
        queue: SendQueue,
        memory: PieceMemory,
        pool: PoolWriter,
        peers: DecodePeers,
        transfer: TransferEngine,
        clock: Clock | None = None,
        layers: range | None = None,
    ) -> None:
        """With `layers` these alone are sent, and nothing is put to the pool."""
        self._ticket = ticket
        self._layers = layers or range(memory.layout.num_layers)
        self._puts = layers is None
        self._keys = list(keys)  # of the full blocks
        self._queue, self._memory, self._pool = queue, memory, pool
        self._peers, self._transfer = peers, transfer
        # The decode worker's pages look like ours, but it may have more or fewer of them.
        num_pages = ticket.segment.nbytes // memory.layout.page_nbytes
        self._remote_layout = replace(memory.layout, num_pages=num_pages)
        self._pages: Sequence[int] = ()
        self._remote: RemoteSegment | None = None
        self._line: AsyncClient | None = None  # the connection on which the hand-off is open
        self._call: Future[Any] | None = None  # to the decode worker, not answered yet
        self._unsent: deque[_ReadyPieces] = deque()
        self._under_way: list[_SentBatch] = []
        self._sessions: dict[bytes, PutSession] | None = None
        self._clock = clock or SystemClock()
        self._renewed_s = 0.0
        self._checksums = np.zeros((len(ticket.pages), memory.layout.num_layers), dtype="<u4")
        self._sent = np.zeros(self._checksums.shape, dtype=bool)
        self._failure: MoonpoolError | None = None
        self.sent_nbytes = 0

    # called while the prompt is computed

    def begin(self, pages: Sequence[int], num_ready_blocks: int, num_pulled_blocks: int) -> None:
        """The sequence has its pages; the first `num_ready_blocks` are complete, the next ones are being pulled."""
        self._pages = tuple(pages[: len(self._ticket.pages)])
        wanted = self._keys[:num_ready_blocks] + self._keys[num_ready_blocks + num_pulled_blocks :]
        self._put_handoff(self._open)
        if self._puts:
            self._queue.put(Urgency.POOL, lambda: self._begin_puts(wanted))
        self.layers_ready(self._layers, range(num_ready_blocks))

    def layers_ready(self, layers: range, blocks: Sequence[int], ready: ReadyPoint | None = None) -> None:
        """These blocks' pieces of these layers hold their final bytes, on a GPU once `ready` is reached (None: all that
        was enqueued so far). On a GPU, whose copies should be large, all layers at once go together.
        """
        if len(layers) == self._memory.layout.num_layers and self._memory.puts_whole:
            self._queue_pieces(layers, layers, blocks, ready)
        else:
            for layer in layers:
                self.layer_ready(layer, blocks, ready)

    def layer_ready(self, layer: int, blocks: Sequence[int], ready: ReadyPoint | None = None) -> None:
        """As layers_ready(), for the layers of a step in order: on a GPU a few of them go together, and whole blocks to
        the pool with the last one.
        """
        memory, last = self._memory, self._layers.stop - 1
        run = range(max(layer - layer % memory.layer_run, self._layers.start), layer + 1)
        if run.stop % memory.layer_run == 0 or layer == last:
            put = range(0) if not self._puts else range(last + 1) if memory.puts_whole else run
            self._queue_pieces(run, put if put.stop <= layer + 1 else range(0), blocks, ready)

    def _queue_pieces(self, sent: range, put: range, blocks: Sequence[int], ready: ReadyPoint | None) -> None:
        """Queue layers of these blocks for the decode worker, and layers for the pool."""
        pages = self._pages
        page_of = {block: pages[block] for block in blocks if block < len(pages)}
        if not page_of:
            return
        by_step = ready is None
        ready = ready or self._memory.mark()
        self._unsent.append(_ReadyPieces(sent, page_of, ready, by_step))
        self._put_handoff(self._send_next)
        step = max(1, self._pool.max_pieces // len(put)) if put else len(page_of)
        for first in range(0, len(page_of), step) if put else ():
            some = dict(islice(page_of.items(), first, first + step))
            self._queue.put(Urgency.POOL, partial(self._put, put, some, ready))

    def _put_handoff(self, task: Callable[[], None]) -> None:
        self._queue.put(Urgency.HANDOFF, task, self._ticket.address)

    # called once at the end

    def commit(
        self,
        first: TokenOut,
        num_tokens: int,
        on_done: Callable[[MoonpoolError | None], None],
        others: Sequence[SpanChecksums] = (),
    ) -> None:
        """Hand the request over; `on_done` gets the outcome, on the hand-off thread. `others` are the layers that other
        stages have written."""

        def commit() -> None:
            for span in others:
                at = slice(self._ticket.num_present_blocks, None), slice(span.layers.start, span.layers.stop)
                self._checksums[at], self._sent[at] = span.checksums, True
            self._commit(first, num_tokens, on_done)

        self._put_handoff(lambda: self._after_writes(commit))

    def end_writes(self, on_done: Callable[[SpanChecksums | MoonpoolError], None]) -> None:
        """End this stage's part of the hand-off; `on_done` gets the outcome, on the hand-off thread."""
        self._put_handoff(lambda: self._after_writes(lambda: self._end_writes(on_done)))

    def abort(self) -> None:
        """End the hand-off: nothing is written from now on, and the decode worker is told."""
        self._put_handoff(self._abort)

    def finish_puts(self, *, complete: bool, on_done: Callable[[], None]) -> None:
        """Make the blocks visible in the pool, or give their space back. When `on_done` is called, neither the pool nor
        the hand-off reads the pages any more."""

        def finish() -> None:
            self._queue.put(Urgency.POOL, lambda: self._finish_puts(complete, on_done))

        self._put_handoff(lambda: self._after_writes(finish))

    # on the hand-off thread of the decode worker

    def _open(self) -> None:
        if self._line is not None or self._call is not None or self._failure is not None:
            return
        ticket = self._ticket
        call = OpenHandoff(request_id=ticket.request_id, epoch=ticket.epoch, generation=ticket.generation)
        self._await_answer(self._peers.open(ticket.address, call), self._opened)

    def _opened(self, answer: Future[AsyncClient]) -> None:
        """Send what became ready before the decode worker has let this worker write."""
        try:
            self._line = answer.result()
            self._remote = self._transfer.open(self._ticket.segment)
        except MoonpoolError as error:
            self._failure = self._failure or self._explain(error)
        while self._unsent:
            self._send_next()

    def _await_answer(self, call: Future[T], then: Callable[[Future[T]], None]) -> None:
        """Run `then` when the call is answered, without waiting. A hand-off makes one call at a time."""
        self._call = call

        def answered() -> None:
            self._call = None
            then(call)

        self._queue.put_answered(call, answered, self._ticket.address)

    def _send_next(self) -> None:
        """Send the pieces that wait longest, and with them all following layers of theirs that fit the window."""
        if not self._unsent or (self._line is None and self._failure is None):
            return  # sent with earlier ones, or later when the hand-off is open
        pieces = self._unsent.popleft()
        layer_nbytes = len(pieces.page_of) * self._memory.layout.piece_nbytes
        while self._unsent and pieces.continued_by(self._unsent[0]):
            layers = range(pieces.layers.start, self._unsent[0].layers.stop)
            if len(layers) * layer_nbytes > self._window_nbytes:
                break
            pieces = self._unsent.popleft()._replace(layers=layers)
        self._send(pieces.layers, pieces.page_of, pieces.ready)

    def _send(self, layers: range, page_of: dict[int, int], ready: ReadyPoint | None) -> None:
        """Start writing these blocks' pieces of some layers."""
        blocks = [block for block in page_of if block >= self._ticket.num_present_blocks]
        self._wait_for_room(layers, blocks)
        if not blocks or self._failure is not None:
            return
        assert self._remote is not None
        pages = [page_of[block] for block in blocks]
        self._checksums[blocks, layers.start : layers.stop] = self._memory.checksums(pages, layers, ready)
        memories: Sequence[Memory] = [self._memory.memory(page, layers) for page in pages]
        if not self._remote.takes_gpu_memory:
            memories = in_main_memory(memories, HANDOFF_TIMEOUT_S)
        requests: list[TransferRequest] = []
        for block, memory in zip(blocks, memories, strict=True):
            offset, _ = self._remote_layout.piece(self._ticket.pages[block], layers.start)
            requests.append(TransferRequest(TransferOp.WRITE, self._remote, offset, [memory], self._ticket.generation))
        nbytes = len(blocks) * len(layers) * self._memory.layout.piece_nbytes
        ahead_nbytes = nbytes + sum(batch.nbytes for batch in self._under_way)
        try:
            transfer = self._transfer.submit(
                requests,
                priority=Priority.HANDOFF,
                timeout_s=HANDOFF_TIMEOUT_S + ahead_nbytes / _SLOWEST_NBYTES_PER_S,
                room_timeout_s=0.0,  # on the engine's threads, however small: this one goes on with the next layer
            )
        except MoonpoolError as error:
            self._failure = self._explain(error)
            return
        self._queue.track(transfer)
        self._under_way.append(_SentBatch(transfer, layers, frozenset(blocks), nbytes))
        self._sent[blocks, layers.start : layers.stop] = True
        self.sent_nbytes += nbytes

    def _wait_for_room(self, layers: range, blocks: Sequence[int]) -> None:
        """Wait until little enough is under way, and no earlier bytes of the same pieces, which could arrive last."""
        nbytes = sum(batch.nbytes for batch in self._under_way)
        for batch in self._under_way:
            same_layers = batch.layers.start < layers.stop and layers.start < batch.layers.stop
            if nbytes > self._window_nbytes or (same_layers and not batch.blocks.isdisjoint(blocks)):
                batch.transfer.done_within(threading.TIMEOUT_MAX)  # its own deadline ends it
                nbytes -= batch.nbytes
        self._collect()

    @property
    def _window_nbytes(self) -> int:
        direct = self._remote is not None and self._remote.takes_gpu_memory and self._memory.layer_run > 1
        return _GPU_WINDOW_NBYTES if direct else _WINDOW_NBYTES

    def _collect(self) -> None:
        """Forget the batches that have ended, and record the first failure."""
        for batch in self._under_way:
            if batch.transfer.failure is not None and self._failure is None:
                self._failure = self._explain(batch.transfer.failure)
        self._under_way = [batch for batch in self._under_way if not batch.transfer.done()]

    def _after_writes(self, task: Callable[[], None]) -> None:
        """Run the task when nothing of this hand-off is under way any more. Does not wait: other hand-offs go on."""
        self._collect()
        if self._call is not None:
            self._queue.put_answered(self._call, lambda: self._after_writes(task), self._ticket.address)
        elif self._under_way:
            last = self._under_way[-1].transfer
            self._queue.put_after(last, lambda: self._after_writes(task), self._ticket.address)
        else:
            task()

    def _explain(self, error: MoonpoolError) -> MoonpoolError:
        """Return the error as the front end should see it: a decode worker that does not let us in is no fault of the
        client's API key, and another one may do.
        """
        if not isinstance(error, Unauthorized):
            return error
        message = f"this prefill worker cannot write to the decode worker at {self._ticket.address}: {error}"
        self._peers.refusal_log.warning("%s; its requests fail until this setting is corrected", message, key=message)
        return Unavailable(message)

    def _commit(self, first: TokenOut, num_tokens: int, on_done: Callable[[MoonpoolError | None], None]) -> None:
        ticket = self._ticket
        wanted = slice(ticket.num_present_blocks, None)
        call = CommitHandoff(
            request_id=ticket.request_id,
            epoch=ticket.epoch,
            generation=ticket.generation,
            first=first,
            num_tokens=num_tokens,
            checksums=self._checksums[wanted].tobytes(),
        )
        self._finish(call, self._sent[wanted], on_done)

    def _end_writes(self, on_done: Callable[[SpanChecksums | MoonpoolError], None]) -> None:
        ticket, layers = self._ticket, self._layers
        own = slice(ticket.num_present_blocks, None), slice(layers.start, layers.stop)
        call = EndWrites(request_id=ticket.request_id, epoch=ticket.epoch, generation=ticket.generation)
        span = SpanChecksums(layers, self._checksums[own])
        self._finish(call, self._sent[own], lambda error: on_done(error or span))

    def _finish(
        self,
        call: CommitHandoff | EndWrites,
        sent: NDArray[np.bool_],
        on_done: Callable[[MoonpoolError | None], None],
    ) -> None:
        """Make the last call of a hand-off, if all of `sent` is; otherwise, or if it fails, release the pages."""
        if self._failure is None and not sent.all():
            self._failure = Internal(f"request {self._ticket.request_id}: a piece was never handed over")
        if self._failure is None:
            assert self._line is not None, "what is sent was opened"
            self._await_answer(self._peers.call(self._line, call), lambda answer: self._finished(answer, on_done))
        else:
            self._release()
            on_done(self._failure)

    def _finished(self, answer: Future[None], on_done: Callable[[MoonpoolError | None], None]) -> None:
        try:
            answer.result()
        except MoonpoolError as error:
            self._failure = self._failure or error
            self._release()
            on_done(error)
        else:
            self._line = None  # the decode worker has the pages, or this stage's part of them
            on_done(None)

    def _abort(self) -> None:
        self._failure = self._failure or Cancelled("the hand-off was given up")  # so that nothing is sent any more
        for batch in self._under_way:
            batch.transfer.cancel()
        self._after_writes(self._release)

    def _release(self) -> None:
        """Tell the decode worker, once, that nothing is written any more. The end of the connection says it too."""
        line, self._line = self._line, None
        if line is not None:
            ticket = self._ticket
            call = AbortHandoff(request_id=ticket.request_id, epoch=ticket.epoch, generation=ticket.generation)
            self._peers.send(line, call)

    # on the pool thread

    def _begin_puts(self, keys: Sequence[bytes]) -> None:
        if self._sessions is None:
            parents = dict(zip(self._keys[1:], self._keys, strict=False))  # each block continues the one before it
            self._sessions = self._pool.begin(keys, parents) if keys else {}
            self._renewed_s = self._clock.now_s()

    def _put(self, layers: range, page_of: dict[int, int], ready: ReadyPoint | None) -> None:
        assert self._sessions is not None
        if self._sessions and self._clock.now_s() - self._renewed_s >= _RENEW_EVERY_S:
            self._renewed_s = self._clock.now_s()
            self._pool.renew(list(self._sessions.values()))
        pages: dict[PutSession, int] = {}
        for block, page in page_of.items():
            session = self._sessions.get(self._keys[block]) if block < len(self._keys) else None
            if session is not None:
                pages[session] = page
        failed = self._pool.write(pages, layers, ready)
        if failed:
            self._sessions = {key: session for key, session in self._sessions.items() if session not in failed}

    def _finish_puts(self, complete: bool, on_done: Callable[[], None]) -> None:
        sessions = list((self._sessions or {}).values())
        if sessions and complete:
            self._pool.finish(sessions)
        elif sessions:
            self._pool.abort(sessions)
        self._sessions = {}
        on_done()
