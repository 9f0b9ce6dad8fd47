"""A numbered call that arrives twice is done once, however late its copy arrives."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from state_pool import Pool
from store_pool import MIB, LocalPool
from waiting import HANG_S

from moonpool.base.rpc import BlockingClient, Call
from moonpool.master.state.answers import MAX_CALLS, MAX_VALUES, Answer, Answers
from moonpool.master.state.records import Outcomes
from moonpool.store.client import Put
from moonpool.store.messages import SERVICE, Remove, RemoveMatching


def done(number: int) -> Answer:
    return Answer([10 * number], number)


def test_the_first_is_done_and_the_others_get_its_answer() -> None:
    answers, acted = Answers(Outcomes(False)), list[int]()

    def act(number: int) -> Answer:
        acted.append(number)
        return done(number)

    assert [answers.once(number, 1, partial(act, number)) for number in (3, 4, 3, 4)] == [*map(done, (3, 4, 3, 4))]
    assert acted == [3, 4]
    assert [answers.once(0, 1, lambda: act(5)) for _ in range(2)] == [done(5), done(5)]
    assert acted == [3, 4, 5, 5], "number 0 is none"


def test_what_failed_may_be_tried_again() -> None:
    answers = Answers(Outcomes(False))

    def fail() -> Answer:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        answers.once(1, 1, fail)
    assert answers.once(1, 1, lambda: done(7)) == done(7)


@pytest.mark.parametrize(
    ("num_values", "num_kept"), [(1, MAX_CALLS), (MAX_VALUES // 4, 4), (MAX_VALUES, 1), (2 * MAX_VALUES, 1)]
)
def test_no_more_is_remembered_than_is_stated(num_values: int, num_kept: int) -> None:
    answers, first, again = Answers(Outcomes(False)), Answer([1] * (num_values - 1), 0), Answer([2], 0)
    last = num_kept + 9
    for number in range(1, last + 1):
        answers.once(number, 1, lambda: first)
    assert answers.once(last - num_kept + 1, 1, lambda: again) == first
    assert answers.once(last - num_kept, 1, lambda: again) == again


@pytest.mark.parametrize("is_snapshot", [False, True], ids=["journal", "snapshot"])
def test_answers_survive_a_restart(is_snapshot: bool) -> None:
    pool = Pool("a")
    for number in range(1, 3000):
        pool.state.answers.once(number, 1, partial(done, number))
    if is_snapshot:
        pool.snapshot()
    pool.restart()
    found = [pool.state.answers.once(number, 1, lambda: Answer([-1], 0)).values for number in (1, 2000, 2999, 3000)]
    assert found == [[10], [20_000], [29_990], [-1]]


CALLS = [Remove(keys=[b"key"], force=True, idempotency_key=5), RemoveMatching(force=True, idempotency_key=5)]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_a_late_copy_does_not_take_what_was_stored_since(tmp_path: Path, call: Call[Any]) -> None:
    pool = LocalPool(tmp_path, MIB)
    try:
        with pool.client() as client:
            assert client.put_objects([Put(b"key", [b"old"])]) == [None]
            line, given_up = (BlockingClient(pool.address, SERVICE) for _ in range(2))
            answer = line.call(call, timeout_s=HANG_S)
            assert client.put_objects([Put(b"key", [b"new"])]) == [None]
            assert given_up.call(call, timeout_s=HANG_S) == answer
            assert client.get_many([b"key"]) == [b"new"]
            line.close()
            given_up.close()
    finally:
        pool.close()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_a_copy_that_reaches_the_next_master_does_not_either(tmp_path: Path, call: Call[Any]) -> None:
    """The answer was lost with the master; before the client asks again, another one has stored the key."""
    pool = LocalPool(tmp_path, MIB)
    try:
        with pool.client(retry_s=HANG_S) as client:
            assert client.put_objects([Put(b"key", [b"old"])]) == [None]
            answer = ask(pool, call)
            pool.loop.run(pool.master.close())
            pool.start_master()
            assert client.put_objects([Put(b"key", [b"new"])]) == [None]
            assert ask(pool, call) == answer
            assert client.get_many([b"key"]) == [b"new"]
    finally:
        pool.close()


def ask(pool: LocalPool, call: Call[Any]) -> Any:
    line = BlockingClient(pool.address, SERVICE)
    try:
        return line.call(call, timeout_s=HANG_S)
    finally:
        line.close()
