"""The threads that send: hand-offs first, a bug ends its task only, close runs what is queued."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import pytest
from waiting import HANG_S, wait_until

from moonpool.transfer import Pending
from moonpool.worker.kv_link.send_queue import SendQueue, Urgency


@pytest.fixture
def queue() -> Iterator[SendQueue]:
    queue = SendQueue()
    yield queue
    queue.close()
    assert not any(thread.is_alive() for thread in queue.threads.values())


def held(gate: threading.Event) -> Callable[[], None]:
    """A task that waits at the gate for longer than any test."""

    def wait() -> None:
        gate.wait(5 * HANG_S)

    return wait


def test_hand_offs_overtake_the_pool_and_keep_their_own_order(queue: SendQueue) -> None:
    gate, done, order = threading.Event(), threading.Event(), list[str]()
    queue.put(Urgency.POOL, held(gate))
    for number in range(3):
        queue.put(Urgency.POOL, partial(order.append, f"pool {number}"))
        queue.put(Urgency.HANDOFF, partial(order.append, f"handoff {number}"))
    queue.put(Urgency.POOL, done.set)
    gate.set()
    assert done.wait(HANG_S)
    assert order == ["handoff 0", "handoff 1", "handoff 2", "pool 0", "pool 1", "pool 2"]


def test_a_bug_in_a_task_does_not_end_the_thread(queue: SendQueue, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    with caplog.at_level(logging.ERROR):
        queue.put(Urgency.HANDOFF, lambda: [][0])
        queue.put(Urgency.HANDOFF, done.set)
        assert done.wait(HANG_S)
    assert "bug in an outgoing transfer" in caplog.text
    assert "IndexError" in caplog.text


def test_close_runs_what_is_queued_and_may_be_said_twice() -> None:
    queue, ran = SendQueue(), list[int]()
    for number in range(100):
        queue.put(Urgency.POOL, partial(ran.append, number))
    queue.close()
    queue.close()
    assert ran == list(range(100))


def test_close_gives_up_on_a_task_that_hangs() -> None:
    queue, gate = SendQueue(), threading.Event()
    queue.put(Urgency.POOL, held(gate))
    started_s = time.monotonic()
    queue.close(timeout_s=0.05)
    assert time.monotonic() - started_s < HANG_S / 2
    gate.set()
    queue.close()
    assert not any(thread.is_alive() for thread in queue.threads.values())


def test_its_length_is_what_waits(queue: SendQueue) -> None:
    gate, running = threading.Event(), threading.Event()
    queue.put(Urgency.POOL, running.set)
    queue.put(Urgency.POOL, held(gate))
    assert running.wait(HANG_S)
    for _ in range(2):
        queue.put(Urgency.POOL, lambda: None)
    wait_until(lambda: len(queue) <= 2, "the one that waits at the gate is not counted")
    assert len(queue) == 2
    gate.set()


def test_hand_offs_count_until_they_have_ended(queue: SendQueue) -> None:
    """A worker that leaves waits until its queue is empty; a hand-off on the wire, or not answered, must not be cut."""
    transfer, call, ended = Pending[None](), Future[None](), list[str]()
    queue.put_after(transfer, lambda: ended.append("written"))
    queue.put_answered(call, lambda: ended.append("answered"))
    assert len(queue) == 2
    transfer.resolve(None)
    wait_until(lambda: ended == ["written"], "its task has run")
    wait_until(lambda: len(queue) <= 1, "and is not counted any more")
    assert len(queue) == 1
    call.set_result(None)
    wait_until(lambda: not len(queue), "nothing is under way")
    assert ended == ["written", "answered"]


def test_the_pool_does_not_wait_for_an_answer_but_close_does() -> None:
    queue, call, order, done = SendQueue(), Future[None](), list[str](), threading.Event()
    queue.put_answered(call, lambda: order.append("answered"), "worker")
    queue.put(Urgency.POOL, lambda: order.append("pool"))
    queue.put(Urgency.POOL, done.set)
    assert done.wait(HANG_S), "nothing of a call is on the wire to the pool"
    closing = threading.Thread(target=queue.close, args=[HANG_S])
    closing.start()
    call.set_result(None)
    closing.join(HANG_S)
    assert order == ["pool", "answered"]


def test_a_pool_that_hangs_delays_no_hand_off(queue: SendQueue) -> None:
    gate, begun, done = threading.Event(), threading.Event(), threading.Event()
    queue.put(Urgency.POOL, begun.set)
    queue.put(Urgency.POOL, held(gate))
    assert begun.wait(HANG_S)
    queue.put(Urgency.HANDOFF, done.set)
    assert done.wait(HANG_S / 2), "the pool's task has not ended"
    assert not gate.is_set()
    gate.set()


def test_the_pool_waits_for_hand_offs_on_the_wire(queue: SendQueue) -> None:
    first, second, order, done = Pending[None](), Pending[None](), list[str](), threading.Event()
    queue.track(first)
    queue.put_after(second, lambda: order.append("after"))
    queue.put(Urgency.POOL, lambda: order.append("pool"))
    queue.put(Urgency.POOL, done.set)
    first.resolve(None)
    assert not done.wait(0.05)
    assert order == []
    second.resolve(None)
    assert done.wait(HANG_S)
    assert order == ["after", "pool"]


def test_a_decode_worker_that_does_not_answer_delays_no_hand_off_to_another(queue: SendQueue) -> None:
    gate, done, order = threading.Event(), threading.Event(), list[str]()
    queue.put(Urgency.HANDOFF, held(gate), "silent")
    queue.put(Urgency.HANDOFF, lambda: order.append("silent"), "silent")
    queue.put(Urgency.HANDOFF, done.set, "other")
    assert done.wait(HANG_S / 2)
    assert order == [], "its own hand-offs keep their order"
    gate.set()


def test_a_lane_that_is_idle_ends_its_thread_and_comes_back() -> None:
    queue, done = SendQueue(idle_s=0.01), threading.Event()
    try:
        for _ in range(2):
            done.clear()
            queue.put(Urgency.HANDOFF, done.set, "worker")
            assert done.wait(HANG_S)
            wait_until(lambda: len(queue.threads) <= 1, "its thread has ended")
    finally:
        queue.close()
