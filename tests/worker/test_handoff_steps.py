"""How many steps of a decode worker pass between the commit of a hand-off and the request's first token from there.

The test plays the engine's thread, so that it can count: a commit takes two boundaries between steps, one to begin and
one to adopt the pages, and they are checked beside the step in between. The next step computes the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any, cast

import pytest
from waiting import until

from moonpool.base.clock import VirtualClock
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.engine.blocks import PageManager
from moonpool.engine.engine import StepOutput
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.sampler import SampledToken
from moonpool.engine.scheduler import Scheduler, SchedulerConfig
from moonpool.engine.sequence import SamplingParams
from moonpool.worker.decode import DecodeRole
from moonpool.worker.kv_link.pieces import HostPieces
from moonpool.worker.kv_link.reservations import Reservations
from moonpool.worker.messages import CommitHandoff, DecodeItem, RequestSpec, Ticket, TokenOut
from moonpool.worker.metrics import Samples

LAYOUT = KvLayout(num_pages=16, num_layers=1, num_kv_heads=1, block_tokens=4, head_dim=4, dtype="float32")
PROMPT = tuple(range(6))
UNUSED: Any = None  # puts of blocks, which nothing here computes


class PlayedLoop:
    """Stands for the engine's thread: functions wait until the test runs them."""

    def __init__(self) -> None:
        self.posted: list[Callable[[], None]] = []

    def post(self, function: Callable[[], None]) -> None:
        self.posted.append(function)

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.post(lambda: future.set_result(function()))
        return future


class PlayedWorker:
    def __init__(self) -> None:
        self.loop = PlayedLoop()
        self.pieces = HostPieces(memoryview(bytearray(LAYOUT.total_nbytes)), LAYOUT)
        pages = PageManager(LAYOUT.num_pages, LAYOUT.block_tokens)
        self.scheduler = Scheduler(SchedulerConfig(max_batch_tokens=64, max_num_seqs=8, max_seq_tokens=32), pages)
        segment = SegmentDescriptor(name="d/kv", nbytes=0, incarnation=1, host="", endpoints=())
        self.role = DecodeRole(
            scheduler=self.scheduler,
            reservations=Reservations(pages, lambda pages, generation: None),
            memory=self.pieces,
            pool=UNUSED,
            queue=UNUSED,
            samples=Samples(),
            describe=lambda: ("unix:/d", segment),
            clock=VirtualClock(),
        )
        self.role.loop = cast(Any, self.loop)
        self.items: dict[str, list[DecodeItem]] = {}
        self.following: list[asyncio.Task[None]] = []

    async def follow(self, name: str) -> None:
        spec = RequestSpec(
            request_id=name,
            epoch=1,
            tokens=list(PROMPT),
            num_prompt_tokens=len(PROMPT),
            root=bytes(32),
            params=SamplingParams(max_tokens=20),
            timeout_s=600,
        )
        items = self.items[name] = []
        async for item in self.role.decode(spec):
            items.append(item)

    async def reserve(self, name: str) -> Ticket:
        """Ask for a request's pages, and go on to read its stream."""
        following = asyncio.create_task(self.follow(name))
        self.following.append(following)
        await until(lambda: following.done() or self.loop.posted, "the request has entered")
        self.boundary()
        await until(lambda: following.done() or self.items.get(name), "the ticket has come")
        ticket = self.items[name][0].ticket
        assert ticket is not None
        return ticket

    def commit(self, ticket: Ticket) -> asyncio.Task[None]:
        checksums = self.pieces.checksums(ticket.pages[ticket.num_present_blocks :], range(LAYOUT.num_layers), None)
        call = CommitHandoff(
            request_id=ticket.request_id,
            epoch=ticket.epoch,
            generation=ticket.generation,
            first=TokenOut(7),
            num_tokens=len(PROMPT),
            checksums=checksums.astype("<u4").tobytes(),
        )
        return asyncio.create_task(self.role.commit_handoff(call))

    def boundary(self) -> None:
        """What the engine's thread does between two steps."""
        while self.loop.posted:
            self.loop.posted.pop(0)()
        self.role.at_boundary()

    def step(self) -> list[str]:
        """A boundary and a step; return the requests that the step computed, without their epoch."""
        self.boundary()
        chunks = self.scheduler.schedule()
        if not chunks:
            return []
        result = self.scheduler.complete({chunk.request_id: 9 for chunk in chunks})
        self.role.on_step(
            [StepOutput(each.request_id, SampledToken(9), each.finish_reason, 0) for each in result.accepted]
        )
        return [chunk.request_id.split("/")[0] for chunk in chunks]

    async def close(self) -> None:
        for task in self.following:
            task.cancel()
        await asyncio.gather(*self.following, return_exceptions=True)

    async def hand_over(self, name: str) -> list[list[str]]:
        """The steps from its commit on, as many as a commit takes."""
        ticket = await self.reserve(name)
        committing = self.commit(ticket)
        steps = []
        for _ in range(2):
            await until(lambda: committing.done() or self.loop.posted, "the engine's thread has something to do")
            steps.append(self.step())
        return steps


@pytest.fixture
async def worker() -> AsyncIterator[PlayedWorker]:
    played = PlayedWorker()
    yield played
    await played.close()


@pytest.mark.parametrize("running", [[], ["old"], ["older", "old"]], ids=["idle", "one runs", "two run"])
async def test_a_hand_off_joins_the_step_after_its_check(worker: PlayedWorker, running: list[str]) -> None:
    for name in running:
        await worker.hand_over(name)
    assert await worker.hand_over("new") == [running, [*running, "new"]]
    await until(lambda: len(worker.items["new"]) == 2, "its first token of this worker has come")
    assert worker.items["new"][1] == DecodeItem(tokens=(TokenOut(9),))
