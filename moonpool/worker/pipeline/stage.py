"""One prompt at one stage, on the event loop: its prefix from the pool, its inbox, its chunks on their way, and what
goes to the next stage.

However it ends, close() leaves nothing behind: no page, no memory, no call that waits.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from moonpool.base.cluster import REQUEST_LIMITS, WORKER_SERVICE
from moonpool.base.errors import Cancelled, InvalidInput, MoonpoolError
from moonpool.base.rpc import AsyncClient
from moonpool.engine.runner import Runner
from moonpool.engine.stages import WINDOW, chunk_bounds
from moonpool.transfer import Priority, TransferEngine, TransferOp, TransferRequest
from moonpool.transfer.memory.segment import Segment
from moonpool.worker.kv_link.pull_job import PullResult
from moonpool.worker.kv_link.push import Push
from moonpool.worker.loop import EngineLoop
from moonpool.worker.messages import ChunkReady, RequestSpec, StageInbox, Ticket
from moonpool.worker.pipeline.prefix import PrefixPuller
from moonpool.worker.pipeline.stage_runner import StagedPrompt, StageRunner
from moonpool.worker.prefill import engine_name

_T = TypeVar("_T")
_SEND_TIMEOUT_S = 10.0  # of one chunk's hidden states
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTools:
    """What all stages of a worker share. `make_push` makes the Push of some layers of a prompt."""

    name: str
    runner: Runner
    stages: StageRunner
    loop: EngineLoop
    transfer: TransferEngine
    prefix: PrefixPuller
    make_push: Callable[[Ticket, Sequence[bytes], range], Push]

    @property
    def num_layers(self) -> int:
        return self.runner.model.config.num_layers

    @property
    def token_nbytes(self) -> int:
        """Bytes of the hidden states of one token."""
        return self.runner.model.config.hidden_size * self.runner.model.dtype.itemsize


class ActivationInbox:
    """Memory for hidden states that another stage writes: a few chunks, in turn."""

    def __init__(self, tools: StageTools, address: str, max_chunk_tokens: int) -> None:
        self._tools, self._slot_nbytes = tools, max_chunk_tokens * tools.token_nbytes
        name = f"{tools.name}/stage/{next(_NUMBERS)}"
        self._segment = Segment.allocate(name, WINDOW * self._slot_nbytes, incarnation=time.time_ns())
        try:
            self._memory = self._segment.memory
            descriptor = tools.transfer.serve(self._segment)
        except BaseException:
            self._segment.close()
            raise
        self.place = StageInbox(address=address, segment=descriptor, num_slots=WINDOW, slot_nbytes=self._slot_nbytes)

    def read(self, number: int, num_tokens: int) -> torch.Tensor:
        """Return the hidden states of a chunk, [tokens, hidden]. They stay until the chunk is computed."""
        model = self._tools.runner.model
        size, offset = model.config.hidden_size, number % WINDOW * self._slot_nbytes
        flat = torch.frombuffer(self._memory, dtype=model.dtype, count=num_tokens * size, offset=offset)
        return flat.view(num_tokens, size)

    def close(self) -> None:
        """Idempotent. Late writes of another process go to memory that is never read."""
        self._tools.transfer.unserve(self._segment.name)
        self._segment.close()


class Stage:
    """`max_chunk_tokens` is for what it has room. `on_last` gets the last chunk's result, on the engine's thread.
    `address` is this worker's."""

    def __init__(
        self,
        tools: StageTools,
        spec: RequestSpec,
        ticket: Ticket,
        layers: range,
        max_chunk_tokens: int,
        on_last: Callable[[torch.Tensor], None],
        address: str,
    ) -> None:
        if not (0 <= layers.start < layers.stop <= tools.num_layers and max_chunk_tokens >= 1):
            raise InvalidInput(
                f"no stage has layers {layers} of {tools.num_layers} in chunks of {max_chunk_tokens} tokens"
            )
        self._tools, self._events, self._on_last = tools, asyncio.get_running_loop(), on_last
        self.spec, self.layers = spec, layers
        self.is_last = layers.stop == tools.num_layers
        self._max_chunk_tokens = min(max_chunk_tokens, len(spec.tokens))
        self.inbox = ActivationInbox(tools, address, self._max_chunk_tokens) if layers.start else None
        self.push = tools.make_push(ticket, (), layers)
        self.prompt = StagedPrompt(
            name=engine_name(spec),
            tokens=spec.tokens,
            layers=layers,
            is_last=self.is_last,
            push=self.push,
            read_hidden=self._read_hidden if layers.start else None,
            on_computed=self._computed,
            on_failure=lambda error: self._post(lambda: self._fail(error)),
        )
        self._num_pulled = 0  # leading blocks whose KV is in the pages
        self._started = asyncio.Event()
        self._outputs: asyncio.Queue[tuple[int, torch.Tensor]] = asyncio.Queue()
        self._arrived: list[asyncio.Future[None]] = []  # of each chunk that has arrived; done when it is computed
        self.failed: asyncio.Future[None] = self._events.create_future()  # never has a result

    async def reserve(self) -> None:
        """Raise NoSpace if there are too few pages now."""
        await self._tools.loop.ask(lambda: self._tools.stages.reserve(self.prompt))

    async def pull(self, keys: Sequence[bytes]) -> PullResult:
        """Bring this stage's layers of these blocks, the first ones, from the pool. Return what has arrived. Raise
        NoSpace or Cancelled as PrefixPuller.pull()."""
        result = await self._tools.prefix.pull(self.prompt, keys)
        self._num_pulled = result.num_good
        return result

    async def start(self, first_token: int, chunk_tokens: int) -> None:
        """Hand over and compute from `first_token` on. InvalidInput if not all KV before it is here, if the chunks are
        larger than the stage has room for, or if it computes already."""
        num_blocks, rest = divmod(first_token, self._tools.stages.block_tokens)
        if self._started.is_set() or rest or not 0 <= num_blocks <= self._num_pulled:
            raise InvalidInput(f"a stage with {self._num_pulled} blocks cannot begin at token {first_token}")
        if chunk_tokens > self._max_chunk_tokens:
            raise InvalidInput(f"a stage for {self._max_chunk_tokens} tokens at once got chunks of {chunk_tokens}")
        bounds = chunk_bounds(len(self.spec.tokens), chunk_tokens, first_token)
        await self._tools.loop.ask(lambda: self._tools.stages.start(self.prompt, bounds))
        self._started.set()

    async def chunk_ready(self, number: int) -> None:
        """The chunk is in the inbox; return once it is computed."""
        if self.inbox is None or number != len(self._arrived):
            raise InvalidInput(f"chunk {number} came when chunk {len(self._arrived)} was next")
        computed: asyncio.Future[None] = self._events.create_future()
        self._arrived.append(computed)
        self._tools.loop.post(lambda: self._tools.stages.arrived(self.prompt.name))
        await computed

    async def send_on(self, target: StageInbox) -> None:
        """Send every chunk to the next stage as it is computed. Return when the next stage has taken the last."""
        async with asyncio.TaskGroup() as taking:
            client = await AsyncClient.connect(
                target.address, WORKER_SERVICE, name=self._tools.name, silence_limits=REQUEST_LIMITS
            )
            try:
                remote = await asyncio.to_thread(self._tools.transfer.open, target.segment)
                takes = []
                await self._started.wait()
                for _ in self.prompt.bounds:
                    number, hidden = await self._outputs.get()
                    data = hidden.contiguous().view(torch.uint8).numpy().data.cast("B")
                    offset = number % target.num_slots * target.slot_nbytes
                    request = TransferRequest(TransferOp.WRITE, remote, offset, [data])
                    await asyncio.to_thread(self._write, request)
                    takes.append(taking.create_task(self._take(client, number)))
                await asyncio.gather(*takes)
            finally:
                client.close()

    def _write(self, request: TransferRequest) -> None:
        self._tools.transfer.submit([request], priority=Priority.HANDOFF, timeout_s=_SEND_TIMEOUT_S).wait()

    async def _take(self, client: AsyncClient, number: int) -> None:
        call = ChunkReady(request_id=self.spec.request_id, epoch=self.spec.epoch, number=number)
        await client.call(call, timeout_s=self.spec.timeout_s)
        self._tools.loop.post(lambda: self._tools.stages.taken(self.prompt.name))

    def close(self) -> None:
        """End everything; no effect on what has ended. On the event loop."""
        self._fail(Cancelled("the stage has ended"))
        self.push.abort()
        self._tools.loop.post(lambda: self._tools.stages.drop(self.prompt))
        if self.inbox is not None:
            self.inbox.close()

    # on the engine's thread

    def _read_hidden(self, number: int) -> torch.Tensor:
        assert self.inbox is not None
        start, end = self.prompt.bounds[number]
        return self.inbox.read(number, end - start)

    def _computed(self, number: int, found: torch.Tensor) -> None:
        if number == len(self.prompt.bounds) - 1:
            self._on_last(found)
        self._post(lambda: self._pass_on(number, found))

    def _post(self, function: Callable[[], None]) -> None:
        self._events.call_soon_threadsafe(function)

    # on the event loop

    def _pass_on(self, number: int, found: torch.Tensor) -> None:
        if self.inbox is not None and not self._arrived[number].done():
            self._arrived[number].set_result(None)
        if not self.is_last:
            self._outputs.put_nowait((number, found))

    def _fail(self, error: MoonpoolError) -> None:
        for computed in self._arrived:
            if not computed.done():
                computed.set_exception(error)
                computed.exception()  # retrieved: its caller may be gone
        if not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()


def settle(future: asyncio.Future[_T], outcome: _T | MoonpoolError) -> None:
    """Give the future its outcome, unless it has one. On the event loop."""
    if future.done():
        return
    if isinstance(outcome, MoonpoolError):
        future.set_exception(outcome)
        future.exception()  # retrieved here, because the caller may have stopped waiting
    else:
        future.set_result(outcome)
