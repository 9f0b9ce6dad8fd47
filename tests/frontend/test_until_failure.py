"""Work that ends early when something else fails: what is raised, and that no cancellation is left behind."""

from __future__ import annotations

import asyncio

import pytest

from moonpool.base.errors import PeerLost
from moonpool.frontend.until_failure import until_failure


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("work")


def new_future() -> asyncio.Future[int]:
    return asyncio.get_running_loop().create_future()


def num_cancels() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def test_the_result_of_the_work() -> None:
    other = new_future()
    asyncio.get_running_loop().call_soon(other.set_result, 1)  # which is no failure
    assert await until_failure(asyncio.sleep(0.01, "done"), other) == "done"
    waiting = new_future()
    assert await until_failure(asyncio.sleep(0, "done"), waiting) == "done"
    assert not waiting.done()
    waiting.set_exception(PeerLost("later"))
    await asyncio.sleep(0.01)  # no callback is left that would cancel this test
    assert isinstance(waiting.exception(), PeerLost)
    assert num_cancels() == 0


@pytest.mark.parametrize("before", [False, True])
async def test_the_failure_of_the_other(before: bool) -> None:
    other, ended = new_future(), list[str]()
    if before:
        other.set_exception(PeerLost("gone"))
    else:
        asyncio.get_running_loop().call_soon(other.set_exception, PeerLost("gone"))
    with pytest.raises(PeerLost, match="gone"):
        await until_failure(forever(ended), other)
    assert ended == ["work"]
    assert num_cancels() == 0
    await asyncio.sleep(0)


async def test_an_error_of_the_work_counts_even_if_the_other_fails_meanwhile() -> None:
    other = new_future()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("its own")

    asyncio.get_running_loop().call_soon(other.set_exception, PeerLost("gone"))
    with pytest.raises(ValueError, match="its own"):
        await until_failure(work(), other)
    assert num_cancels() == 0
    assert isinstance(other.exception(), PeerLost)


async def test_the_other_fails_in_the_moment_in_which_the_work_ends() -> None:
    other = new_future()

    async def work() -> int:
        await asyncio.sleep(0)
        other.set_exception(PeerLost("gone"))
        return 7

    assert await until_failure(work(), other) == 7
    await asyncio.sleep(0.01)
    assert num_cancels() == 0
    assert isinstance(other.exception(), PeerLost)


@pytest.mark.parametrize("fails_too", [False, True])
async def test_a_cancellation_of_the_caller_stays_one(fails_too: bool) -> None:
    other, ended = new_future(), list[str]()
    caller = asyncio.create_task(until_failure(forever(ended), other))
    await asyncio.sleep(0)
    caller.cancel()
    if fails_too:
        other.set_exception(PeerLost("gone"))
        other.exception()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended == ["work"]
    assert not other.cancelled()


async def test_within_a_time_limit() -> None:
    other, ended = new_future(), list[str]()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await until_failure(forever(ended), other)
    assert ended == ["work"]
    assert num_cancels() == 0
