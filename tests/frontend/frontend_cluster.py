"""A cluster for tests of the front end: the real conductor, and workers that speak the real protocol over real
sockets but run a toy model whose next token is a function of all tokens before it and the seed. A token lost,
repeated or taken from another position therefore changes everything that follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from letter_codec import LetterCodec
from waiting import HANG_S, until

from moonpool.base.cluster import REQUEST_LIMITS, WORKER_SERVICE, RegisterWorker, WorkerInfo, WorkerRole
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import MoonpoolError
from moonpool.base.metrics import GetMetrics, MetricFamily, MetricSample
from moonpool.base.rpc import AsyncClient, Call, RpcPeer, RpcServer
from moonpool.conductor.messages import DecisionRecord
from moonpool.conductor.records.store import RecordFilter
from moonpool.conductor.service import Conductor, ConductorConfig
from moonpool.conductor.state import ConductorState
from moonpool.engine.sequence import SamplingParams
from moonpool.frontend.connection import ConnectionLimits
from moonpool.frontend.prompts import ServedModel
from moonpool.frontend.service import Frontend, FrontendConfig
from moonpool.worker.messages import (
    CommitHandoff,
    Decode,
    DecodeItem,
    Prefill,
    PrefillItem,
    PrefillReply,
    RequestSpec,
    Ticket,
    TokenOut,
)

BLOCK_TOKENS = 4
EOS = 0
MAX_MODEL_LEN = 400
MODEL = "toy"
IDENTITY = bytes(range(32))
HANDOFF_S = 0.001  # that prefill workers report
_INCARNATIONS = itertools.count(1)


def next_token(tokens: Sequence[int], seed: int) -> int:
    state = seed % 1_000_003
    for token in tokens:
        state = (state * 31 + token + 7) % 1_000_003
    return EOS if state % 41 == 0 else 97 + state % 26


def finish_reason(token: int, num_output: int, params: SamplingParams) -> str | None:
    if token == EOS and not params.ignore_eos:
        return "stop"
    return "length" if num_output >= params.max_tokens else None


def expected(prompt: str | list[int], max_tokens: int, seed: int = 0) -> tuple[str, str]:
    """(text, finish reason) of an undisturbed run."""
    tokens = LetterCodec().encode(prompt) if isinstance(prompt, str) else list(prompt)
    start, params = len(tokens), SamplingParams(max_tokens=max_tokens)
    while True:
        tokens.append(next_token(tokens, seed))
        reason = finish_reason(tokens[-1], len(tokens) - start, params)
        if reason is not None:
            shown = tokens[start:-1] if reason == "stop" else tokens[start:]
            return "".join(map(chr, shown)), reason


def chat_prompt(content: str) -> str:
    return LetterCodec().render_chat([{"role": "user", "content": content}])


class ToyWorker:
    """`die_after` kills it after that many tokens (decode) or calls (prefill); `errors` are raised one per call,
    `handoff_errors` after the first token."""

    def __init__(self, name: str, role: WorkerRole, conductor_address: str) -> None:
        self.name = name
        self.role = role
        self.specs: list[RequestSpec] = []
        self.num_active = 0
        self.token_s = 0.0
        self.die_after: int | None = None
        self.die_during_prefill = self.die_during_handoff = False
        self.errors: list[MoonpoolError] = []
        self.handoff_errors: list[MoonpoolError] = []
        # Before a prompt's first token or an answer's next one; before a hand-off; before the word that it is over.
        self.may_go_on, self.may_hand_over, self.may_report = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for event in (self.may_go_on, self.may_hand_over, self.may_report):
            event.set()
        self.gone = asyncio.Event()
        self.num_pages = 1000
        self._conductor_address = conductor_address
        self._handoffs: dict[tuple[str, int], asyncio.Future[TokenOut]] = {}
        self._dying: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.incarnation = next(_INCARNATIONS)
        handlers: dict[type[Call[Any]], Callable[[Any, RpcPeer], Any]] = {
            Decode: self._decode,
            Prefill: self._prefill,
            CommitHandoff: self._commit,
            GetMetrics: lambda call, peer: [MetricFamily("toy_steps", "Steps", "counter", [self._sample()])],
        }
        self._server = RpcServer(WORKER_SERVICE, handlers, name=self.name, incarnation=self.incarnation)
        self.address = await self._server.listen("tcp:127.0.0.1:0")
        self.conductor = await AsyncClient.connect(
            self._conductor_address, "conductor", name=self.name, silence_limits=REQUEST_LIMITS
        )
        info = WorkerInfo(
            name=self.name,
            role=self.role,
            address=self.address,
            incarnation=self.incarnation,
            identity=IDENTITY,
            model=MODEL,
            block_tokens=BLOCK_TOKENS,
            num_pages=self.num_pages,
            max_num_seqs=64,
            page_nbytes=1024,
        )
        await self.conductor.call(RegisterWorker(info=info))

    @property
    def num_handed_over(self) -> int:
        """Prompts whose KV this decode worker has and whose answers go on."""
        return sum(handoff.done() for handoff in self._handoffs.values())

    async def kill(self) -> None:
        self.conductor.close()
        await self.conductor.closed.wait()
        await self._server.close()
        self.gone.set()

    def _sample(self) -> MetricSample:
        return MetricSample("toy_steps_total", {}, 7.0)

    def _die(self) -> asyncio.Future[None]:
        if self._dying is None:
            self._dying = asyncio.create_task(self.kill())
        return asyncio.get_running_loop().create_future()  # never: what follows death does not happen

    async def _decode(self, call: Decode, peer: object) -> AsyncIterator[DecodeItem]:
        spec = call.spec
        self.specs.append(spec)
        if self.errors:
            raise self.errors.pop(0)
        handoff = self._handoffs[spec.request_id, spec.epoch] = asyncio.get_running_loop().create_future()
        self.num_active += 1
        try:
            yield DecodeItem(ticket=self._ticket(spec))
            tokens = [*spec.tokens, (await handoff).token]
            async for item in self._tokens(spec, tokens):
                yield item
        finally:
            self.num_active -= 1
            del self._handoffs[spec.request_id, spec.epoch]

    async def _tokens(self, spec: RequestSpec, tokens: list[int]) -> AsyncIterator[DecodeItem]:
        for count in itertools.count():
            if count == self.die_after:
                await self._die()
            await self.may_go_on.wait()
            await asyncio.sleep(self.token_s)
            out = toy_token(spec.params, tokens)
            tokens.append(out.token)
            reason = finish_reason(out.token, len(tokens) - spec.num_prompt_tokens, spec.params)
            yield DecodeItem(tokens=(out,), finish_reason=reason)
            if reason is not None:
                return

    async def _prefill(self, call: Prefill, peer: object) -> AsyncIterator[PrefillItem]:
        spec = call.spec
        self.specs.append(spec)
        self.num_active += 1
        try:
            if self.errors:
                raise self.errors.pop(0)
            if self.die_during_prefill or len(self.specs) - 1 == self.die_after:
                await self._die()
            await self.may_go_on.wait()
            first = toy_token(spec.params, spec.tokens)
            reason = finish_reason(first.token, len(spec.tokens) + 1 - spec.num_prompt_tokens, spec.params)
            yield PrefillItem(reply=toy_reply(first, reason))
            if reason is None:
                await self._hand_over(call, first)
                await self.may_report.wait()
                yield PrefillItem(handoff_s=HANDOFF_S)
        finally:
            self.num_active -= 1

    async def _hand_over(self, call: Prefill, first: TokenOut) -> None:
        await self.may_hand_over.wait()
        if self.handoff_errors:
            raise self.handoff_errors.pop(0)
        if self.die_during_handoff:
            await self._die()
        spec = call.spec
        decode = await AsyncClient.connect(call.ticket.address, WORKER_SERVICE)
        with contextlib.closing(decode):
            await decode.call(
                CommitHandoff(
                    request_id=spec.request_id,
                    epoch=spec.epoch,
                    generation=1,
                    first=first,
                    num_tokens=len(spec.tokens),
                    checksums=b"",
                )
            )

    def _commit(self, call: CommitHandoff, peer: object) -> None:
        handoff = self._handoffs[call.request_id, call.epoch]
        if not handoff.done():
            handoff.set_result(call.first)

    def _ticket(self, spec: RequestSpec) -> Ticket:
        segment = SegmentDescriptor(name=self.name, nbytes=0, incarnation=1, host="toy", endpoints=())
        return Ticket(
            request_id=spec.request_id,
            epoch=spec.epoch,
            address=self.address,
            segment=segment,
            pages=[],
            num_present_blocks=0,
            generation=1,
        )


def toy_reply(first: TokenOut, reason: str | None) -> PrefillReply:
    return PrefillReply(
        first=first,
        finish_reason=reason,
        local_tokens=4,
        pool_tokens=8,
        pool_nbytes=2048,
        queue_s=0.0,
        compute_s=0.0,
    )


def toy_token(params: SamplingParams, tokens: Sequence[int]) -> TokenOut:
    token = next_token(tokens, params.seed)
    if params.logprobs is None:
        return TokenOut(token)
    return TokenOut(token, -0.5, tuple((97 + rank, -0.5 - rank) for rank in range(params.logprobs)))


class ToyCluster:
    """A conductor, toy workers and one front end. Use as `async with`."""

    def __init__(
        self,
        state_dir: Path,
        num_prefill: int = 1,
        num_decode: int = 1,
        conductor: ConductorConfig | None = None,
        limits: ConnectionLimits | None = None,
        **settings: Any,
    ) -> None:
        self._state_dir = state_dir
        self._conductor_config = conductor or ConductorConfig()
        self._limits = limits
        self._settings = settings
        self._counts = {WorkerRole.PREFILL: num_prefill, WorkerRole.DECODE: num_decode}
        self.workers: dict[str, ToyWorker] = {}
        self.url = ""

    async def __aenter__(self) -> ToyCluster:
        self.conductor = Conductor(self._conductor_config)
        self.conductor_address = await self.conductor.start()
        for role, count in self._counts.items():
            for number in range(count):
                await self.add_worker(f"{role.value}{number}", role)
        config = FrontendConfig(
            conductor_address=self.conductor_address, state_dir=str(self._state_dir), model=MODEL, port=0
        )
        config = replace(config, prompt_process=False)  # what is asked of it here is asked of few tests
        self.frontend = Frontend(replace(config, **self._settings), load_toy, self._limits)
        self.url = await self.frontend.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.frontend.close()
        for worker in self.workers.values():
            await worker.kill()
        await self.conductor.close()

    async def add_worker(self, name: str, role: WorkerRole) -> ToyWorker:
        worker = self.workers[name] = ToyWorker(name, role, self.conductor_address)
        await worker.start()
        return worker

    @property
    def prefill(self) -> ToyWorker:
        return self.workers["prefill0"]

    @property
    def decode(self) -> ToyWorker:
        return self.workers["decode0"]

    @property
    def state(self) -> ConductorState:
        return self.conductor.state

    @property
    def num_waiting(self) -> int:
        """The requests that the conductor keeps until there is room for them."""
        return self.conductor._queue.num_waiting

    def client(self, **headers: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=HANG_S, headers=headers)

    def records(self, limit: int = 100) -> list[DecisionRecord]:
        return self.state.records.find(RecordFilter(), limit)

    @property
    def num_seen(self) -> int:
        return sum(len(worker.specs) for worker in self.workers.values())

    async def until_idle(self) -> None:
        """Returns when no worker holds anything for anybody."""
        workers = self.workers.values()
        await until(lambda: not any(worker.num_active for worker in workers), "no worker has work for anybody")


async def until_page(http: httpx.AsyncClient, path: str, shows: str) -> str:
    """Return the page as soon as it shows this."""
    async with asyncio.timeout(HANG_S):
        while shows not in (page := (await http.get(path)).text):  # noqa: ASYNC110 - asked over the wire
            await asyncio.sleep(0.01)
    return page


def load_toy(config: FrontendConfig) -> ServedModel:
    return ServedModel(MODEL, LetterCodec(), config.max_model_len or MAX_MODEL_LEN)
