"""The decode role on an engine thread that the test plays itself, so that every interleaving can be written down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, cast

import pytest

from moonpool.base.clock import VirtualClock
from moonpool.base.cluster import ReportedRequest
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.engine.blocks import PageManager
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.scheduler import Scheduler, SchedulerConfig
from moonpool.engine.sequence import FullBlock, SamplingParams
from moonpool.engine.sequence import Sequence as RequestSequence
from moonpool.worker.decode import DecodeRole
from moonpool.worker.kv_link.pieces import HostPieces
from moonpool.worker.kv_link.pool import PoolWriter
from moonpool.worker.kv_link.reservations import Reservations
from moonpool.worker.kv_link.send_queue import SendQueue, Urgency
from moonpool.worker.loop import EngineLoop
from moonpool.worker.messages import DecodeItem, RequestSpec
from moonpool.worker.metrics import Samples
from moonpool.worker.reporter import ReportCollector, ReportSource

LAYOUT = KvLayout(num_pages=8, num_layers=1, num_kv_heads=1, block_tokens=4, head_dim=4, dtype="float32")


class HandLoop:
    """Posts wait until the test runs them."""

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

    def run_posted(self) -> None:
        posted, self.posted = self.posted, []
        for function in posted:
            function()


class HandQueue:
    """Tasks wait until the test runs them."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], None]] = []

    def put(self, urgency: Urgency, task: Callable[[], None]) -> None:
        self.tasks.append(task)

    def __len__(self) -> int:
        return len(self.tasks)


class RememberingPool:
    """Remembers what it read from pages, instead of putting it."""

    def __init__(self, pieces: HostPieces) -> None:
        self._pieces = pieces
        self.puts: list[tuple[bytes, bytes]] = []

    def put_pages(self, blocks: Mapping[int, FullBlock], ready: object = None) -> None:
        self.puts += [(block.key, bytes(self._pieces.piece(page, 0))) for page, block in blocks.items()]


def spec_of(name: str, num_tokens: int, timeout_s: float = 5.0, tenant: str = "") -> RequestSpec:
    return RequestSpec(
        request_id=name,
        epoch=1,
        tokens=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        root=bytes(32),
        params=SamplingParams(max_tokens=4),
        timeout_s=timeout_s,
        tenant=tenant,
    )


class Bench:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.pages = PageManager(LAYOUT.num_pages, LAYOUT.block_tokens)
        self.scheduler = Scheduler(SchedulerConfig(64, 8, 32), self.pages)
        self.memory = memoryview(bytearray(LAYOUT.total_nbytes))
        pieces = HostPieces(self.memory, LAYOUT)
        self.loop, self.queue, self.pool = HandLoop(), HandQueue(), RememberingPool(pieces)
        self.samples = Samples()
        self.reservations = Reservations(self.pages, lambda pages, generation: None)
        segment = SegmentDescriptor(name="d/kv", nbytes=0, incarnation=1, host="", endpoints=())
        self.role = DecodeRole(
            scheduler=self.scheduler,
            reservations=self.reservations,
            memory=pieces,
            pool=cast(PoolWriter, self.pool),
            queue=cast(SendQueue, self.queue),
            samples=self.samples,
            describe=lambda: ("unix:/d", segment),
            clock=self.clock,
        )
        self.role.loop = cast(EngineLoop, self.loop)
        self.failures: dict[str, MoonpoolError] = {}  # of follow(), by request

    def ask(self, name: str, num_tokens: int = 8, timeout_s: float = 5.0, tenant: str = "") -> asyncio.Task[DecodeItem]:
        async def first() -> DecodeItem:
            async for item in self.role.decode(spec_of(name, num_tokens, timeout_s, tenant)):
                return item
            raise AssertionError("a stream begins with its ticket")

        return asyncio.create_task(first())

    def follow(self, name: str, num_tokens: int) -> asyncio.Task[None]:
        """Keep the stream open; its error goes to `failures`."""

        async def read() -> None:
            try:
                async for _ in self.role.decode(spec_of(name, num_tokens)):
                    pass
            except MoonpoolError as error:
                self.failures[name] = error

        return asyncio.create_task(read())

    async def settle(self) -> None:
        """Lets the event loop do all it can."""
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
async def test_pages_become_free_just_when_the_client_gives_up(bench: Bench, how: str) -> None:
    """The engine's thread looks for waiting streams after the client has gone and before it is told so."""
    bench.pages.reserve("others", LAYOUT.num_pages)
    asking = bench.ask("r", timeout_s=5.0 if how == "cancelled" else 0.3)
    await bench.settle()
    bench.loop.run_posted()  # enters and finds no page
    if how == "cancelled":
        await bench.settle()
        asking.cancel()
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else MoonpoolError):
        await asking
    await bench.settle()
    assert len(bench.loop.posted) == 1, "its good-bye is on its way"
    bench.pages.release("others")
    bench.role.at_boundary()
    bench.loop.run_posted()
    bench.role.at_boundary()
    assert bench.pages.num_available == LAYOUT.num_pages
    assert bench.reservations.num_pages == 0


async def test_first_come_first_served(bench: Bench) -> None:
    bench.pages.reserve("others", 5)
    asking = [bench.ask("large", 16), bench.ask("small", 4)]
    await bench.settle()
    bench.loop.run_posted()
    await bench.settle()
    assert not any(task.done() for task in asking), "small ones do not overtake, else large ones starve"
    bench.pages.release("others")
    bench.role.at_boundary()
    large, small = [await task for task in asking]
    assert large.ticket is not None
    assert small.ticket is not None
    assert (len(large.ticket.pages), len(small.ticket.pages)) == (4, 1)


async def test_a_tenant_above_its_share_makes_way_for_the_prompt_of_another_one(bench: Bench) -> None:
    for number in range(4):
        running = RequestSequence(
            f"a{number}/1",
            [number, *range(6)],
            SamplingParams(max_tokens=6),
            root=bytes(32),
            block_tokens=4,
            output=[1],
            tenant="a",
        )
        running.pages, running.num_computed_tokens = bench.pages.allocate(2), 7
        bench.scheduler.adopt(running)
    chunks = bench.scheduler.schedule()
    bench.scheduler.complete({chunk.request_id: 5 for chunk in chunks})
    assert (len(chunks), bench.pages.num_available) == (4, 0)
    own = bench.ask("more", 8, tenant="a")
    asking = [bench.ask(f"b{number}", 8, tenant="b") for number in range(3)]
    await bench.settle()
    bench.loop.run_posted()
    await bench.settle()
    assert [task.done() for task in (own, *asking)] == [False, True, True, False], "each tenant has half of the pages"
    assert [each.request_id for each in bench.scheduler.queues.running] == ["a0/1", "a1/1"]
    assert [each.request_id for each in bench.scheduler.queues.waiting] == ["a2/1", "a3/1"]
    for task in (own, *asking):
        task.cancel()
    await asyncio.wait((own, *asking))
    bench.loop.run_posted()
    while bench.scheduler.has_work():
        bench.scheduler.complete({chunk.request_id: 5 for chunk in bench.scheduler.schedule()})
    bench.role.at_boundary()
    assert bench.pages.num_available == LAYOUT.num_pages, "all of them have ended"


async def test_a_preempted_request_gets_its_pages_before_new_ones(bench: Bench) -> None:
    """Else a stream of short prompts keeps a long one from ever going on."""
    taken = bench.pages.allocate(7)
    preempted = RequestSequence(
        "old/1", list(range(12)), SamplingParams(max_tokens=8), root=bytes(32), block_tokens=4, output=[1]
    )
    bench.scheduler.add(preempted)
    assert bench.scheduler.schedule() == [], "four pages are wanted and one is free"
    asking = bench.ask("new", 4)
    await bench.settle()
    bench.loop.run_posted()
    await bench.settle()
    assert not asking.done()
    bench.pages.free(taken)
    bench.role.at_boundary()
    assert [chunk.request_id for chunk in bench.scheduler.schedule()] == ["old/1"]
    bench.scheduler.complete({"old/1": 5})
    bench.role.at_boundary()
    assert (await asking).ticket is not None
    bench.loop.run_posted()
    bench.scheduler.check_integrity()


async def test_a_report_counts_the_pages_that_requests_wait_for_and_names_those_that_came(bench: Bench) -> None:
    source = ReportSource(
        bench.scheduler, bench.samples, lambda: (), bench.role.awaited, lambda: bench.role.unreserved_pages
    )
    collector = ReportCollector("d", 1, source)
    preempted = RequestSequence("old/1", list(range(12)), SamplingParams(max_tokens=8), root=bytes(32), block_tokens=4)
    streams = [bench.follow("has", 8), bench.follow("waits", 28)]
    await bench.settle()
    bench.loop.run_posted()
    first = collector.first_report()
    assert first.arrived == ("has", "waits")
    assert (first.load.free_pages, first.load.waiting_pages) == (6, 7)
    assert first.requests == (ReportedRequest("has", 8, 0, 4), ReportedRequest("waits", 28, 0, 4))
    bench.scheduler.add(preempted)
    streams.append(bench.follow("new", 4))
    await bench.settle()
    bench.loop.run_posted()
    source.share()
    second = collector.report(2)
    assert second.arrived == ("new",)
    assert set(second.requests) == {ReportedRequest("old", 12, 0, 8), ReportedRequest("new", 4, 0, 4)}
    assert (second.load.free_pages, second.load.waiting_pages) == (6, 3 + 7 + 1)
    for stream in streams:
        stream.cancel()
    await asyncio.wait(streams)
    bench.loop.run_posted()
    source.share()
    third = collector.report(3)
    assert (third.load.free_pages, collector.report(4).load.waiting_pages) == (8, 3)
    assert (third.requests, set(third.gone)) == ((), {"has", "waits", "new"})
    assert collector.first_report().requests == (ReportedRequest("old", 12, 0, 8),), "the list of a new registration"


async def test_reserved_pages_are_given_up_when_waiting_requests_cannot_go_on_without_them(bench: Bench) -> None:
    """Else two workers that change their roles may wait for each other's pages for ever."""
    streams = [bench.follow("old", 8), bench.follow("new", 8), bench.follow("written", 12)]
    await bench.settle()
    bench.loop.run_posted()
    await bench.settle()
    bench.reservations.open("written", 1, 3, "a prefill worker")
    prompt = RequestSequence("prompt/1", list(range(8)), SamplingParams(max_tokens=1), root=bytes(32), block_tokens=4)
    bench.scheduler.add(prompt)
    assert bench.scheduler.schedule() == [], "one page is free"
    bench.role.at_boundary()
    bench.clock.advance(1.9)
    bench.role.at_boundary()
    await bench.settle()
    assert bench.failures == {}, "not at once: a prefill may be about to begin"
    bench.clock.advance(0.2)
    bench.role.at_boundary()
    await bench.settle()
    assert list(bench.failures) == ["new"], "one at a time, the newest first"
    assert isinstance(bench.failures["new"], Unavailable), "the front end tries another worker"
    bench.loop.run_posted()
    assert [chunk.request_id for chunk in bench.scheduler.schedule()] == ["prompt/1"]
    bench.role.begin_step(())
    bench.clock.advance(9)
    bench.role.at_boundary()
    await bench.settle()
    assert list(bench.failures) == ["new"], "it goes on"
    for stream in streams:
        stream.cancel()
    await asyncio.wait(streams)


async def test_a_block_put_twice_is_held_until_the_second_put_is_done(bench: Bench) -> None:
    """A preempted request completes a block again while its first put still waits."""
    [page] = bench.pages.allocate(1)
    key = bytes(range(32))
    bench.pages.publish([page], [key])
    right = b"R" * LAYOUT.page_nbytes
    bench.memory[page * LAYOUT.page_nbytes : (page + 1) * LAYOUT.page_nbytes] = right
    block = FullBlock("r/1", 0, page, key)
    bench.role.completed([block])
    bench.role.completed([block])
    bench.pages.free([page])
    first, second = bench.queue.tasks
    first()
    bench.loop.run_posted()
    for other in bench.pages.allocate(bench.pages.num_available):  # whoever comes next writes where they may
        bench.memory[other * LAYOUT.page_nbytes : (other + 1) * LAYOUT.page_nbytes] = b"X" * LAYOUT.page_nbytes
    second()
    bench.loop.run_posted()
    assert bench.pool.puts == [(key, right), (key, right)]
    assert bench.pages.owned == {}
