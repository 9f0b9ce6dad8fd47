"""A result on its way, seen from threads and from event loops."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import uvloop
from waiting import HANG_S

from moonpool.base.errors import Cancelled, DeadlineExceeded, Internal, NotFound, Overloaded, PeerLost
from moonpool.transfer.pending import Pending, ThreadPool

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
NewLoop = Callable[[], asyncio.AbstractEventLoop]


def later(act: Callable[[], object], delay_s: float = 0.02) -> threading.Timer:
    timer = threading.Timer(delay_s, act)
    timer.start()
    return timer


def test_waiting_on_a_thread() -> None:
    pending: Pending[int] = Pending()
    assert not pending.done()
    assert not pending.done_within(0.0)
    with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        pending.wait(0.01)
    later(lambda: pending.resolve(7)).join()
    assert pending.done()
    assert pending.wait() == pending.wait(0) == 7
    pending.fail(NotFound("too late"))
    pending.cancel()
    assert pending.wait() == 7
    assert pending.failure is None


def test_callbacks_are_called_once_each_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    pending: Pending[int] = Pending()
    seen: list[Pending[int]] = []
    pending.add_done_callback(seen.append)
    pending.add_done_callback(lambda _: 1 // 0)
    pending.add_done_callback(seen.append)
    with caplog.at_level(logging.ERROR):
        pending.fail(NotFound("x"))
        pending.add_done_callback(seen.append)
    assert seen == [pending] * 3
    assert "ZeroDivisionError" in caplog.text
    with pytest.raises(NotFound):
        pending.wait()


@LOOPS
def test_many_await_one_result(new_loop: NewLoop) -> None:
    pending: Pending[str] = Pending()
    threads = set(threading.enumerate())

    async def ask() -> list[str]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_result(pending)) for _ in range(20)]
            await asyncio.sleep(0)
            assert set(threading.enumerate()) <= threads, "a thread for a waiter"
            await asyncio.to_thread(pending.resolve, "here")
        return [task.result() for task in tasks]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(ask()) == ["here"] * 20
        assert runner.run(_result(pending)) == "here"


async def _result(pending: Pending[str]) -> str:
    return await pending


@LOOPS
def test_an_awaited_failure_is_raised(new_loop: NewLoop) -> None:
    pending: Pending[str] = Pending()
    timer = later(lambda: pending.fail(PeerLost("gone")))
    with asyncio.Runner(loop_factory=new_loop) as runner, pytest.raises(PeerLost):
        runner.run(_result(pending))
    timer.join()


@LOOPS
def test_a_cancelled_await_ends_when_all_is_over_and_not_before(new_loop: NewLoop) -> None:
    asked = threading.Event()
    pending: Pending[str] = Pending(asked.set)

    async def cancel_twice() -> None:
        task = asyncio.create_task(_result(pending))
        for _ in range(2):
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.sleep(0.01)
            assert asked.is_set()
            assert not task.done(), "the buffers are still in use"
        timer = later(lambda: pending.fail(Cancelled("as asked")))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pending.done()
        timer.join()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(cancel_twice())


@LOOPS
def test_a_timeout_around_an_await_is_a_timeout(new_loop: NewLoop) -> None:
    pending: Pending[str] = Pending(lambda: pending.fail(Cancelled("as asked")))

    async def hurry() -> None:
        async with asyncio.timeout(0.01):
            await pending

    with asyncio.Runner(loop_factory=new_loop) as runner, pytest.raises(TimeoutError):
        runner.run(hurry())


@LOOPS
def test_a_loop_that_is_gone_hurts_nobody(new_loop: NewLoop, caplog: pytest.LogCaptureFixture) -> None:
    pending: Pending[str] = Pending()
    loop = new_loop()
    coroutine = _result(pending)
    task = loop.create_task(coroutine)
    loop.run_until_complete(asyncio.sleep(0))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    pending.resolve("nobody listens")
    assert pending.wait() == "nobody listens"
    coroutine.close()
    del task
    gc.collect()
    assert not caplog.records


def note(seen: list[int], _: Pending[int]) -> None:
    seen.append(1)


def test_ends_and_waiters_race() -> None:
    for _ in range(200):
        pending: Pending[int] = Pending()
        seen: list[int] = []
        with ThreadPoolExecutor(3) as pool:
            pool.submit(pending.resolve, 1)
            pool.submit(pending.add_done_callback, partial(note, seen))
            assert pool.submit(pending.wait, 5).result() == 1
        assert seen == [1]


def test_a_crews_calls() -> None:
    crew = ThreadPool("test", 1)
    begun, go = threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        assert go.wait(HANG_S)
        return "done"

    ran: list[str] = []
    running, waiting = crew.call(work), crew.call(lambda: ran.append("never"))
    broken, last = crew.call(lambda: 1 // 0), crew.call(lambda: "last")
    assert begun.wait(HANG_S)
    waiting.cancel()
    running.cancel()
    for dropped in (waiting, running):
        with pytest.raises(Cancelled):
            dropped.wait(0)
    go.set()
    with pytest.raises(Internal, match="ZeroDivisionError"):
        broken.wait(HANG_S)
    assert last.wait(HANG_S) == "last"
    assert not ran
    crew.close()
    crew.join(HANG_S)
    with pytest.raises(PeerLost):
        crew.call(lambda: 1).wait(0)


def test_a_crew_takes_so_many_calls_and_no_more() -> None:
    crew, gate = ThreadPool("test", 1), threading.Event()
    begun = threading.Event()

    def wait_at_the_gate() -> bool:
        begun.set()
        return gate.wait(HANG_S)

    first = crew.call(wait_at_the_gate)
    assert begun.wait(HANG_S)
    waiting = [crew.call(lambda: "done") for _ in range(4096)]
    with pytest.raises(Overloaded):
        crew.call(lambda: "one too many").wait(1)
    gate.set()
    assert first.wait(HANG_S)
    assert {each.wait(HANG_S) for each in waiting} == {"done"}
    crew.close()
    crew.join(HANG_S)
