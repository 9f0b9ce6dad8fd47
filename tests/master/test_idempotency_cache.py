"""A numbered call that arrives twice is done once, however late its copy arrives."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from store_pool import MIB, LocalPool
from waiting import HANG_S

from moonpool.base.rpc import BlockingClient, Call
from moonpool.master.calls import MAX_ANSWERS, MAX_CACHED_CALLS, IdempotencyCache
from moonpool.store.client import Put
from moonpool.store.messages import SERVICE, Remove, RemoveMatching


def test_the_first_is_done_and_the_others_get_its_answer() -> None:
    cache, done = IdempotencyCache(), list[int]()

    def act(number: int) -> int:
        done.append(number)
        return 10 * number

    assert [cache.once(number, 1, partial(act, number)) for number in (3, 4, 3, 4)] == [30, 40, 30, 40]
    assert done == [3, 4]
    assert [cache.once(0, 1, lambda: act(5)) for _ in range(2)] == [50, 50]
    assert done == [3, 4, 5, 5], "number 0 is none"


def test_what_failed_may_be_tried_again() -> None:
    cache = IdempotencyCache()
    with pytest.raises(ZeroDivisionError):
        cache.once(1, 1, lambda: 1 // 0)
    assert cache.once(1, 1, lambda: 7) == 7


@pytest.mark.parametrize(
    ("num_answers", "num_kept"), [(1, MAX_CACHED_CALLS), (MAX_ANSWERS // 4, 4), (MAX_ANSWERS, 1), (2 * MAX_ANSWERS, 1)]
)
def test_no_more_is_remembered_than_is_stated(num_answers: int, num_kept: int) -> None:
    cache = IdempotencyCache()
    last = num_kept + 9
    for number in range(1, last + 1):
        cache.once(number, num_answers, lambda: "first")
    assert cache.once(last - num_kept + 1, num_answers, lambda: "again") == "first"
    assert cache.once(last - num_kept, num_answers, lambda: "again") == "again"


@pytest.mark.parametrize(
    "call", [Remove(keys=[b"key"], force=True, idempotency_key=5), RemoveMatching(force=True, idempotency_key=5)]
)
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
