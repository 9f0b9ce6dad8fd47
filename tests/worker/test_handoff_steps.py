"""How many steps of a decode worker pass between the commit of a hand-off and the request's first token from there.

The test plays the engine's thread, so that it can count: a commit begins and is checked beside a step, and at the next
boundary the request enters the batch. So all hand-offs that were checked meanwhile are in the same step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import pytest
from waiting import HANG_S, until

from moonpool.base.clock import VirtualClock
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import Corrupt, MoonpoolError, StaleGeneration
from moonpool.engine.blocks import PageManager
from moonpool.engine.engine import StepOutput
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.sampler import SampledToken
from moonpool.engine.scheduler import Scheduler, SchedulerConfig
from moonpool.engine.sequence import SamplingParams
from moonpool.worker import decode
from moonpool.worker.decode import DecodeRole
from moonpool.worker.kv_link.pieces import Checksums, HostPieces, ReadyPoint
from moonpool.worker.kv_link.reservations import Reservations
from moonpool.worker.messages import (
    AbortHandoff,
    CommitHandoff,
    DecodeItem,
    OpenHandoff,
    RequestSpec,
    Ticket,
    TokenOut,
)
from moonpool.worker.metrics import Samples

LAYOUT = KvLayout(num_pages=64, num_layers=1, num_kv_heads=1, block_tokens=4, head_dim=4, dtype="float32")
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

        def run() -> None:
            try:
                future.set_result(function())
            except MoonpoolError as error:
                future.set_exception(error)

        self.post(run)
        return future

    async def ask(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.call(function))


class LaggingPieces(HostPieces):
    """Memory of a device that does what it was given when its owner waits for it, and not before."""

    def __init__(self) -> None:
        super().__init__(memoryview(bytearray(LAYOUT.total_nbytes)), LAYOUT)
        self.launched: list[Callable[[], None]] = []
        self.num_done = 0
        self.check_together: threading.Barrier | None = None  # so many threads take checksums at the same time

    def mark(self) -> ReadyPoint:
        return LaunchedSoFar(self, len(self.launched))

    def checksums(self, pages: Sequence[int], layers: range, ready: ReadyPoint | None = None) -> Checksums:
        if self.check_together is not None:
            self.check_together.wait(HANG_S)
        if ready is not None:
            ready.synchronize()
        return super().checksums(pages, layers)


@dataclass
class LaunchedSoFar:
    device: LaggingPieces
    number: int

    def synchronize(self) -> None:
        while self.device.num_done < self.number:
            self.device.launched[self.device.num_done]()
            self.device.num_done += 1


class PlayedWorker:
    def __init__(self) -> None:
        self.loop = PlayedLoop()
        self.pieces = LaggingPieces()
        pages = PageManager(LAYOUT.num_pages, LAYOUT.block_tokens)
        self.scheduler = Scheduler(SchedulerConfig(max_batch_tokens=64, max_num_seqs=32, max_seq_tokens=32), pages)
        segment = SegmentDescriptor(name="d/kv", nbytes=0, incarnation=1, host="", endpoints=())
        self.role = DecodeRole(
            scheduler=self.scheduler,
            reservations=Reservations(pages, lambda pages, generation: None, self.pieces.mark),
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
        written = ticket.pages[ticket.num_present_blocks :]
        checksums = HostPieces.checksums(self.pieces, written, range(LAYOUT.num_layers))
        call = CommitHandoff(
            request_id=ticket.request_id,
            epoch=ticket.epoch,
            generation=ticket.generation,
            first=TokenOut(7),
            num_tokens=len(PROMPT),
            checksums=checksums.astype("<u4").tobytes(),
        )
        self.role.open_handoff(OpenHandoff(request_id=call.request_id, epoch=1, generation=call.generation), self)
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
        self.role.close()

    async def hand_over(self, name: str) -> list[str]:
        """Return what the step after the commit's check computes."""
        ticket = await self.reserve(name)
        self.commit(ticket)
        await until(lambda: self.loop.posted, "the commit is checked")
        return self.step()


@pytest.fixture
async def worker() -> AsyncIterator[PlayedWorker]:
    played = PlayedWorker()
    yield played
    await played.close()


@pytest.mark.parametrize("running", [[], ["old"], ["older", "old"]], ids=["idle", "one runs", "two run"])
async def test_a_hand_off_joins_the_step_after_its_check(worker: PlayedWorker, running: list[str]) -> None:
    for name in running:
        await worker.hand_over(name)
    assert await worker.hand_over("new") == [*running, "new"]
    await until(lambda: len(worker.items["new"]) == 2, "its first token of this worker has come")
    assert worker.items["new"][1] == DecodeItem(tokens=(TokenOut(9),))


async def test_all_hand_offs_that_come_during_a_step_are_in_the_next_one(worker: PlayedWorker) -> None:
    """They are checked at the same time, and not by the few threads that look-ups in a slow pool may take."""
    await worker.hand_over("old")
    names = [f"new{number}" for number in range(24)]
    tickets = [await worker.reserve(name) for name in names]
    worker.pieces.check_together = threading.Barrier(len(names))
    commits = [worker.commit(ticket) for ticket in tickets]
    await until(lambda: len(worker.loop.posted) == len(names), "all are checked, without a turn of the engine's thread")
    assert not any(commit.done() for commit in commits)
    assert sorted(worker.step()) == sorted(["old", *names])
    await asyncio.gather(*commits)


async def test_a_step_launched_before_the_pages_were_reserved_damages_them(worker: PlayedWorker) -> None:
    """It may still write to pages of a sequence that has ended. What it writes there is found before the KV is used."""
    every_page = worker.pieces.memory(0, range(1)).obj
    worker.pieces.launched.append(lambda: memoryview(every_page).__setitem__(slice(None), b"X" * LAYOUT.total_nbytes))
    ticket = await worker.reserve("r")
    commit = worker.commit(ticket)  # its checksums are those of the bytes before that step
    await until(lambda: worker.loop.posted, "the commit is checked")
    assert worker.step() == []
    with pytest.raises(Corrupt):
        await commit
    assert worker.scheduler.pages.num_available == LAYOUT.num_pages


async def test_pages_that_cannot_be_checked_are_freed(worker: PlayedWorker) -> None:
    ticket = await worker.reserve("r")
    worker.pieces.check_together = threading.Barrier(2)
    worker.pieces.check_together.abort()
    commit = worker.commit(ticket)
    with pytest.raises(threading.BrokenBarrierError):
        await commit
    assert worker.step() == []
    assert worker.scheduler.pages.num_available == LAYOUT.num_pages


async def test_a_check_that_takes_long_makes_the_engine_s_thread_wait_for_the_device(
    worker: PlayedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog looks at that thread, so that it notices a device that hangs while there is no step."""
    monkeypatch.setattr(decode, "SLOW_CHECK_S", 0.01)
    ticket = await worker.reserve("r")
    worker.pieces.launched.append(lambda: None)
    together = worker.pieces.check_together = threading.Barrier(2)
    commit = worker.commit(ticket)
    await until(lambda: worker.loop.posted, "the check takes long")
    worker.boundary()
    assert worker.pieces.num_done == 1
    await asyncio.to_thread(together.wait, HANG_S)
    await until(lambda: worker.loop.posted, "the commit is checked")
    assert worker.step() == ["r"]
    await commit


async def test_a_commit_does_not_wait_for_steps_launched_since_the_pages_were_reserved(worker: PlayedWorker) -> None:
    """Those do not write to its pages, and on a GPU there is always one under way."""
    ticket = await worker.reserve("r")
    worker.pieces.launched.append(lambda: None)
    worker.commit(ticket)
    await until(lambda: worker.loop.posted, "the commit is checked")
    assert worker.step() == ["r"]
    assert worker.pieces.num_done == 0


async def test_pages_of_a_writer_that_ends_are_freed_by_the_engine_s_thread(worker: PlayedWorker) -> None:
    pages, tickets = worker.scheduler.pages, [await worker.reserve(name) for name in ("aborted", "gone")]
    for ticket in tickets:
        call = OpenHandoff(request_id=ticket.request_id, epoch=1, generation=ticket.generation)
        worker.role.open_handoff(call, worker)
    worker.role.abort_handoff(
        AbortHandoff(request_id="aborted", epoch=1, generation=tickets[0].generation), writer=worker
    )
    worker.role.writer_gone(worker)
    for ticket in tickets:
        call = OpenHandoff(request_id=ticket.request_id, epoch=1, generation=ticket.generation)
        with pytest.raises(StaleGeneration):
            worker.role.open_handoff(call, worker)
    assert pages.num_available == LAYOUT.num_pages - 4
    worker.boundary()
    assert pages.num_available == LAYOUT.num_pages
