"""The decode role: reserve pages for a prompt, verify the KV that arrives in them, then decode in the running batch.

A request's stream owns its pages: closing the stream releases them. Blocks that decoding completes go to the pool, so
that the next turn of a conversation finds them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from moonpool.base.clock import Clock
from moonpool.base.cluster import DecodeSample, ReportedRequest
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import Corrupt, DeadlineExceeded, MoonpoolError, NoSpace, NotFound, PromptTooLong, Unavailable
from moonpool.engine.engine import StepFailure, StepOutput
from moonpool.engine.scheduler import Scheduler
from moonpool.engine.sequence import AdmittedSequence, FullBlock, pages_for
from moonpool.engine.sequence import Sequence as RequestSequence
from moonpool.engine.step_times import StepTime
from moonpool.engine.tenant_shares import num_pages, shares
from moonpool.worker.kv_link.pieces import PieceMemory, ReadyPoint
from moonpool.worker.kv_link.pool import PoolWriter
from moonpool.worker.kv_link.reservations import Incoming, Reservations
from moonpool.worker.kv_link.send_queue import SendQueue, Urgency
from moonpool.worker.loop import EngineLoop
from moonpool.worker.messages import (
    ALONE_STEPS,
    AbortHandoff,
    CommitHandoff,
    DecodeItem,
    EndWrites,
    OpenHandoff,
    RequestSpec,
    Ticket,
    TokenOut,
)
from moonpool.worker.metrics import Samples
from moonpool.worker.prefill import engine_name, token_out

# Nothing was computed for so long although sequences wait for pages: reserved pages have to help.
_STALL_S = 2.0
# Blocks waiting to be put. Further ones are counted instead of put, so that a slow pool does not hold all pages.
_MAX_WAITING_PUTS = 1024
# Hand-offs whose KV is verified at the same time. On a GPU a thread waits for the device most of the time.
_MAX_VERIFIERS = 32
# A check takes milliseconds, or as long as the step under way.
SLOW_CHECK_S = 1.0

T = TypeVar("T")


async def _ended(task: asyncio.Task[None]) -> None:
    await asyncio.shield(task)


def _uncancellable() -> Future[Incoming]:
    """Return a future that a waiting client cannot cancel: only the engine's thread ends it."""
    future: Future[Incoming] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(slots=True)
class Stream:
    """One request's items for the front end."""

    spec: RequestSpec
    items: asyncio.Queue[DecodeItem | MoonpoolError]
    loop: asyncio.AbstractEventLoop
    entered_s: float = 0.0
    reserved: Future[Incoming] = field(default_factory=_uncancellable)
    left: bool = False

    def send(self, item: DecodeItem | MoonpoolError) -> None:
        """Queue an item; from any thread."""
        self.loop.call_soon_threadsafe(self.items.put_nowait, item)


class DecodeRole:
    """`describe` returns the address and the descriptor for tickets; they are known once the worker serves."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        reservations: Reservations,
        memory: PieceMemory,
        pool: PoolWriter,
        queue: SendQueue,
        samples: Samples,
        describe: Callable[[], tuple[str, SegmentDescriptor]],
        clock: Clock,
    ) -> None:
        self._scheduler, self._reservations, self._memory = scheduler, reservations, memory
        self._pool, self._queue, self._samples = pool, queue, samples
        self._describe, self._clock = describe, clock
        self._block_tokens = scheduler.pages.block_tokens
        self._streams: dict[str, Stream] = {}
        self._waiting: deque[Stream] = deque()  # for pages
        self._commits: set[asyncio.Task[None]] = set()
        # Of its own: look-ups in a slow pool may take all threads of asyncio's.
        self._verifiers = ThreadPoolExecutor(_MAX_VERIFIERS, thread_name_prefix="verify")
        self._put_numbers = itertools.count()
        self._num_waiting_puts = 0  # blocks
        self._stalled_since_s: float | None = None
        self.loop: EngineLoop | None = None  # set once, before the loop starts

    # -- RPC handlers, on the event loop ---------------------------------------------------------------------

    async def decode(self, spec: RequestSpec, resumes: bool = False) -> AsyncIterator[DecodeItem]:
        stream = Stream(spec, asyncio.Queue(), asyncio.get_running_loop())
        assert self.loop is not None
        try:
            await self.loop.ask(lambda: (self._resume if resumes else self._enter)(stream))
            if not resumes:
                incoming = await self._reserved(stream)
                yield DecodeItem(ticket=self._ticket(incoming))
            ended = False
            while not ended:
                item = await stream.items.get()
                if isinstance(item, MoonpoolError):
                    raise item
                ended = item.finish_reason is not None
                yield item
        finally:
            self.loop.post(lambda: self._leave(stream))

    async def _reserved(self, stream: Stream) -> Incoming:
        try:
            async with asyncio.timeout(stream.spec.timeout_s):
                return await asyncio.wrap_future(stream.reserved)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no pages became free within {stream.spec.timeout_s:g} s") from error

    def _ticket(self, incoming: Incoming) -> Ticket:
        address, segment = self._describe()
        return Ticket(
            request_id=incoming.request_id,
            epoch=incoming.epoch,
            address=address,
            segment=segment,
            pages=incoming.pages,
            num_present_blocks=incoming.num_present,
            generation=incoming.generation,
        )

    def open_handoff(self, call: OpenHandoff, writer: object) -> None:
        self._reservations.open(call.request_id, call.epoch, call.generation, id(writer))

    def end_writes(self, call: EndWrites, writer: object) -> None:
        self._reservations.end_writes(call.request_id, call.epoch, call.generation, id(writer))

    def abort_handoff(self, call: AbortHandoff, writer: object) -> None:
        self._free_later(self._reservations.abort(call.request_id, call.epoch, call.generation, id(writer)))

    def writer_gone(self, writer: object) -> None:
        self._free_later(self._reservations.writer_gone(id(writer)))

    def _free_later(self, reservations: Sequence[Incoming]) -> None:
        assert self.loop is not None
        for each in reservations:
            self.loop.post(partial(self._reservations.free, each))

    def commit_handoff(self, call: CommitHandoff) -> Coroutine[Any, Any, None]:
        """Begin the commit now, before later calls of the writer are handled. Return a coroutine that ends when the
        pages are adopted; verifying goes on even when the writer disconnects, so that no page is lost."""
        incoming = self._reservations.begin_commit(call.request_id, call.epoch, call.generation)
        task = asyncio.get_running_loop().create_task(self._commit(incoming, call))
        self._commits.add(task)
        task.add_done_callback(self._committed)
        return _ended(task)

    def _committed(self, task: asyncio.Task[None]) -> None:
        self._commits.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, as the writer may be gone; the reader sees a failed prefill

    async def _commit(self, incoming: Incoming, call: CommitHandoff) -> None:
        """Take one turn of the engine's thread: all hand-offs that are verified by then enter the next step."""
        events = asyncio.get_running_loop()
        checking = events.run_in_executor(self._verifiers, self._verify, incoming, call.checksums)
        try:
            if not (await asyncio.wait((checking,), timeout=SLOW_CHECK_S))[0]:
                self._wait_for_device()
            is_good = await checking
        except BaseException:  # the device failed, or the worker closes
            checking.cancel()
            self._free_later([incoming])
            raise
        await self._on_engine(lambda: self._adopt(incoming, call) if is_good else self._refuse(incoming))

    def _wait_for_device(self) -> None:
        """Let the engine's thread wait for the device: the watchdog then notices if it hangs while there is no step."""
        assert self.loop is not None

        def wait() -> None:
            now = self._memory.mark()
            if now is not None:
                now.synchronize()

        self.loop.post(wait)

    def _verify(self, incoming: Incoming, expected: bytes) -> bool:
        """Return whether every written piece, as it lies in its page, matches its checksum.

        A step that was launched before the pages were reserved may still write to them. It is waited for, so that what
        it writes counts as damage. Later steps do not write there.
        """
        layers = range(self._memory.layout.num_layers)
        found = self._memory.checksums(incoming.pages[incoming.num_present :], layers, incoming.reserved_at)
        return found.astype("<u4").tobytes() == expected

    def close(self) -> None:
        """Idempotent. What is being verified is no longer waited for."""
        self._verifiers.shutdown(wait=False, cancel_futures=True)

    async def _on_engine(self, function: Callable[[], T]) -> T:
        """Wait for as long as it takes: only the function ends the reservation."""
        assert self.loop is not None
        return await asyncio.wrap_future(self.loop.call(function))

    # -- between steps, on the engine's thread ---------------------------------------------------------------

    def _enter(self, stream: Stream) -> None:
        spec = stream.spec
        limit = self._scheduler.config.max_seq_tokens
        if len(spec.tokens) >= limit:
            raise PromptTooLong(f"{len(spec.tokens)} tokens leave no room to answer within {limit}", param="prompt")
        self._streams[engine_name(spec)], stream.entered_s = stream, self._clock.now_s()
        self._samples.arrived.append(spec.request_id)
        self._waiting.append(stream)
        self.at_boundary()

    def _resume(self, stream: Stream) -> None:
        """Queue an answer that another worker has begun; its blocks are pulled while it waits (pull_ahead.py)."""
        self._scheduler.add(self._sequence(stream.spec, None))
        self._samples.arrived.append(stream.spec.request_id)
        self._streams[engine_name(stream.spec)] = stream

    @property
    def streams(self) -> Mapping[str, Stream]:
        """All open streams, by the names of their engine requests."""
        return self._streams

    @property
    def unreserved_pages(self) -> int:
        """Return how many pages the prompts need that wait for pages."""
        return sum(pages_for(len(each.spec.tokens), self._block_tokens) for each in self._waiting if not each.left)

    def awaited(self) -> list[ReportedRequest]:
        """Return the requests whose prompts are not here yet."""
        sequences = self._scheduler.queues.sequences
        specs = [stream.spec for name, stream in self._streams.items() if name not in sequences]
        return [ReportedRequest(each.request_id, len(each.tokens), 0, each.params.max_tokens) for each in specs]

    def at_boundary(self) -> None:
        """Reserve pages for waiting streams: of the tenant with the fewest pages over its weight first, then in order
        of arrival. Preempted requests are served before the streams of tenants that have no fewer."""
        while self._waiting:
            stream = self._next_stream()
            if not stream.left:
                try:
                    incoming = self._reserve_fairly(stream.spec)
                    if incoming is None:
                        break
                    stream.reserved.set_result(incoming)
                    self._samples.times.queue.observe(self._clock.now_s() - stream.entered_s)
                except Exception as error:  # noqa: BLE001 - it concerns this request alone
                    stream.reserved.set_exception(error)
            self._waiting.remove(stream)
        self._end_stall()

    def _next_stream(self) -> Stream:
        first = dict[str, Stream]()
        for stream in self._waiting:
            if stream.left:
                return stream
            first.setdefault(stream.spec.tenant, stream)
        if len(first) == 1:
            return self._waiting[0]
        queues, reserved = self._scheduler.queues, self._reserved_pages()
        taken = shares([*queues.running, *queues.adopted], num_pages)

        def share(stream: Stream) -> float:
            tenant = stream.spec.tenant
            return taken.get(tenant, 0.0) + reserved[tenant] / stream.spec.weight

        return min(first.values(), key=share)

    def _reserved_pages(self) -> Counter[str]:
        """Return how many pages are reserved for prompts of each tenant that are on their way here."""
        found: Counter[str] = Counter()
        for name, stream in self._streams.items():
            reserved = stream.reserved
            if reserved.done() and reserved.exception() is None and self._scheduler.get(name) is None:
                found[stream.spec.tenant] += len(reserved.result().pages)
        return found

    def _reserve_fairly(self, spec: RequestSpec) -> Incoming | None:
        """Reserve pages for the prompt, if necessary those of tenants that have more. Return None if it has to wait."""
        scheduler, num_wanted = self._scheduler, pages_for(len(spec.tokens), self._block_tokens)
        if scheduler.queues.waiting:
            num_reserved = self._reserved_pages()[spec.tenant]
            if not scheduler.may_pass(spec.tenant, spec.weight, num_wanted, num_reserved):
                return None
        try:
            return self._reserve(spec)
        except NoSpace:
            num_reserved = self._reserved_pages()[spec.tenant]
            if not scheduler.make_way(spec.tenant, spec.weight, num_wanted, num_reserved):
                return None
        return self._reserve(spec)

    def _end_stall(self) -> None:
        """Give up the newest reservation that no prefill worker writes to, when sequences have waited for its pages and
        nothing was computed meanwhile: two workers that change their roles could wait for each other for ever. Its
        request is tried again elsewhere.
        """
        now_s, scheduler = self._clock.now_s(), self._scheduler
        if scheduler.ahead.first_ready(scheduler.queues.waiting) is None:
            self._stalled_since_s = None
        elif self._stalled_since_s is None:
            self._stalled_since_s = now_s
        elif now_s - self._stalled_since_s >= _STALL_S:
            self._stalled_since_s = now_s
            idle = self._reservations.newest_without_writer()
            stream = self._streams.get(f"{idle.request_id}/{idle.epoch}") if idle is not None else None
            if stream is not None:
                stream.send(Unavailable("its pages are needed by requests that wait here"))

    def _reserve(self, spec: RequestSpec) -> Incoming:
        sequence = self._sequence(spec, None)
        keys = sequence.keys[: sequence.num_reusable_blocks]
        num_blocks = pages_for(len(spec.tokens), self._block_tokens)
        return self._reservations.reserve(spec.request_id, spec.epoch, num_blocks, keys)

    def _leave(self, stream: Stream) -> None:
        stream.left = True
        name = engine_name(stream.spec)
        if self._streams.get(name) is stream:
            del self._streams[name]
            self._scheduler.cancel(name)
            self._reservations.leave(stream.spec.request_id, stream.spec.epoch)

    def _adopt(self, incoming: Incoming, call: CommitHandoff) -> None:
        stream = self._streams.get(f"{call.request_id}/{call.epoch}")
        pages = self._reservations.adopt(incoming)
        if pages is None or stream is None:
            if pages is not None:
                self._scheduler.pages.free(pages)
            raise NotFound(f"the stream of request {call.request_id} has ended")
        sequence = self._sequence(stream.spec, call.first)
        sequence.pages = pages
        sequence.num_computed_tokens = call.num_tokens
        try:
            self._scheduler.adopt(sequence)
        except Exception:
            self._scheduler.pages.free(pages)
            raise

    def _refuse(self, incoming: Incoming) -> None:
        self._reservations.free(incoming)
        error = Corrupt(f"KV of request {incoming.request_id} was damaged on its way")
        self._samples.pull_failures[error.code] += 1
        raise error

    def _sequence(self, spec: RequestSpec, first: TokenOut | None) -> RequestSequence:
        accepted = spec.tokens[spec.num_prompt_tokens :]
        return RequestSequence(
            engine_name(spec),
            spec.tokens[: spec.num_prompt_tokens],
            spec.params,
            root=spec.root,
            block_tokens=self._block_tokens,
            output=accepted if first is None else [*accepted, first.token],
            num_alone_steps=ALONE_STEPS if spec.alone else 0,
            tenant=spec.tenant,
            weight=spec.weight,
        )

    def on_step(self, outputs: Sequence[StepOutput | StepFailure]) -> None:
        for out in outputs:
            stream = self._streams.get(out.request_id)
            if stream is None:
                continue
            if isinstance(out, StepFailure):
                self._samples.failed_requests += 1
                stream.send(out.error)
            else:
                stream.send(DecodeItem(tokens=(token_out(out.sampled),), finish_reason=out.finish_reason))

    def computed(self, time: StepTime) -> None:
        """Note how long a step of answers took, from token to token: with what the host does between two steps, if the
        device waits for it."""
        if all(len(chunk.tokens) == 1 for chunk in time.chunks):
            kv_tokens = sum(chunk.end for chunk in time.chunks)
            self._samples.decodes.append(DecodeSample(len(time.chunks), kv_tokens, time.period_s))
            self._samples.times.decode_step.observe(time.period_s)

    # -- around a step (roles.py), on the engine's thread ---------------------------------------------------------

    def begin_step(self, resumed: Sequence[AdmittedSequence]) -> None:
        """`resumed` are answers that enter the batch without a hand-off."""
        for entry in resumed:
            sequence = self._scheduler.get(entry.request_id)
            assert sequence is not None, "a sequence in the batch is known"
            self._samples.resumed_answers += 1
            self._samples.recomputed_tokens += sequence.num_uncomputed_tokens
        self._stalled_since_s = None

    def completed(self, full_blocks: Sequence[FullBlock]) -> None:
        pages, blocks = self._scheduler.pages, dict[int, FullBlock]()
        for block in full_blocks:
            page = pages.page_of(block.key)  # another one, when the same block was here before
            if page is None:
                continue
            if self._num_waiting_puts + len(blocks) >= _MAX_WAITING_PUTS:
                self._pool.failures["outbox_full"] += 1
                continue
            blocks[page] = block
        if blocks:
            owner = f"put:{next(self._put_numbers)}"  # a block may be put again while its first put still waits
            pages.hold(owner, list(blocks))
            self._num_waiting_puts += len(blocks)
            self._queue.put(Urgency.POOL, partial(self._put, blocks, owner, self._memory.mark()))

    def _put(self, blocks: Mapping[int, FullBlock], owner: str, ready: ReadyPoint | None) -> None:
        try:
            self._pool.put_pages(blocks, ready)
        finally:
            assert self.loop is not None
            self.loop.post(lambda: self._put_ended(owner, len(blocks)))

    def _put_ended(self, owner: str, num_blocks: int) -> None:
        self._num_waiting_puts -= num_blocks
        self._scheduler.pages.release(owner)
