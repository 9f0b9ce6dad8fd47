"""The threads that send: hand-offs first, a bug ends its task only, close runs what is queued."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from moonpool.transfer import Pending
from moonpool.worker.kv_link.send_queue import SendQueue, Urgency


@pytest.fixture
def queue() -> Iterator[SendQueue]:
    queue = SendQueue()
    yield queue
    queue.close()
    assert not any(thread.is_alive() for thread in queue.threads.values())


def test_hand_offs_overtake_the_pool_and_keep_their_own_order(queue: SendQueue) -> None:
    gate, done, order = threading.Event(), threading.Event(), []
    queue.put(Urgency.POOL, lambda: gate.wait(5) and None)
    for number in range(3):
        queue.put(Urgency.POOL, lambda n=number: order.append(f"pool {n}"))
        queue.put(Urgency.HANDOFF, lambda n=number: order.append(f"handoff {n}"))
    queue.put(Urgency.POOL, done.set)
    gate.set()
    assert done.wait(5)
    assert order == ["handoff 0", "handoff 1", "handoff 2", "pool 0", "pool 1", "pool 2"]


def test_a_bug_in_a_task_does_not_end_the_thread(queue: SendQueue, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    with caplog.at_level(logging.ERROR):
        queue.put(Urgency.HANDOFF, lambda: [][0])
        queue.put(Urgency.HANDOFF, done.set)
        assert done.wait(5)
    assert "bug in an outgoing transfer" in caplog.text
    assert "IndexError" in caplog.text


def test_close_runs_what_is_queued_and_may_be_said_twice() -> None:
    queue, ran = SendQueue(), []
    for number in range(100):
        queue.put(Urgency.POOL, lambda n=number: ran.append(n))
    queue.close()
    queue.close()
    assert ran == list(range(100))


def test_close_gives_up_on_a_task_that_hangs() -> None:
    queue, gate = SendQueue(), threading.Event()
    queue.put(Urgency.POOL, lambda: gate.wait(5) and None)
    started_s = time.monotonic()
    queue.close(timeout_s=0.05)
    assert time.monotonic() - started_s < 2
    gate.set()
    queue.close()
    assert not any(thread.is_alive() for thread in queue.threads.values())


def test_its_length_is_what_waits(queue: SendQueue) -> None:
    gate, running = threading.Event(), threading.Event()
    queue.put(Urgency.POOL, running.set)
    queue.put(Urgency.POOL, lambda: gate.wait(5) and None)
    assert running.wait(5)
    for _ in range(2):
        queue.put(Urgency.POOL, lambda: None)
    while len(queue) > 2:  # the one that waits at the gate is not counted
        time.sleep(0.001)
    assert len(queue) == 2
    gate.set()


def test_a_pool_that_hangs_delays_no_hand_off(queue: SendQueue) -> None:
    gate, begun, done = threading.Event(), threading.Event(), threading.Event()
    queue.put(Urgency.POOL, begun.set)
    queue.put(Urgency.POOL, lambda: gate.wait(5) and None)
    assert begun.wait(5)
    queue.put(Urgency.HANDOFF, done.set)
    assert done.wait(5), "the pool's task has not ended"
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
    assert done.wait(5)
    assert order == ["after", "pool"]


def test_a_decode_worker_that_does_not_answer_delays_no_hand_off_to_another(queue: SendQueue) -> None:
    gate, done, order = threading.Event(), threading.Event(), list[str]()
    queue.put(Urgency.HANDOFF, lambda: gate.wait(5) and None, "silent")
    queue.put(Urgency.HANDOFF, lambda: order.append("silent"), "silent")
    queue.put(Urgency.HANDOFF, done.set, "other")
    assert done.wait(5)
    assert order == [], "its own hand-offs keep their order"
    gate.set()


def test_a_lane_that_is_idle_ends_its_thread_and_comes_back() -> None:
    queue, done = SendQueue(idle_s=0.01), threading.Event()
    try:
        for _ in range(2):
            done.clear()
            queue.put(Urgency.HANDOFF, done.set, "worker")
            assert done.wait(5)
            end_s = time.monotonic() + 5
            while len(queue.threads) > 1:
                assert time.monotonic() < end_s, "its thread has ended"
                time.sleep(0.001)
    finally:
        queue.close()
