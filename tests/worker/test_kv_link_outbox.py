"""The thread that sends: hand-offs first, a bug ends its task only, close runs what is queued."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from moonpool.worker.kv_link.outbox import SendQueue, Urgency


@pytest.fixture
def outbox() -> Iterator[SendQueue]:
    outbox = SendQueue()
    yield outbox
    outbox.close()
    assert not outbox._thread.is_alive()


def test_hand_offs_overtake_the_pool_and_keep_their_own_order(outbox: SendQueue) -> None:
    gate, done, order = threading.Event(), threading.Event(), []
    outbox.put(Urgency.POOL, lambda: gate.wait(5) and None)
    for number in range(3):
        outbox.put(Urgency.POOL, lambda n=number: order.append(f"pool {n}"))
        outbox.put(Urgency.HANDOFF, lambda n=number: order.append(f"handoff {n}"))
    outbox.put(Urgency.POOL, done.set)
    gate.set()
    assert done.wait(5)
    assert order == ["handoff 0", "handoff 1", "handoff 2", "pool 0", "pool 1", "pool 2"]


def test_a_bug_in_a_task_does_not_end_the_thread(outbox: SendQueue, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    with caplog.at_level(logging.ERROR):
        outbox.put(Urgency.HANDOFF, lambda: [][0])
        outbox.put(Urgency.HANDOFF, done.set)
        assert done.wait(5)
    assert "bug in an outgoing transfer" in caplog.text
    assert "IndexError" in caplog.text


def test_close_runs_what_is_queued_and_may_be_said_twice() -> None:
    outbox, ran = SendQueue(), []
    for number in range(100):
        outbox.put(Urgency.POOL, lambda n=number: ran.append(n))
    outbox.close()
    outbox.close()
    assert ran == list(range(100))


def test_close_gives_up_on_a_task_that_hangs() -> None:
    outbox, gate = SendQueue(), threading.Event()
    outbox.put(Urgency.POOL, lambda: gate.wait(5) and None)
    started_s = time.monotonic()
    outbox.close(timeout_s=0.05)
    assert time.monotonic() - started_s < 2
    gate.set()
    outbox.close()
    assert not outbox._thread.is_alive()


def test_its_length_is_what_waits(outbox: SendQueue) -> None:
    gate, running = threading.Event(), threading.Event()
    outbox.put(Urgency.POOL, running.set)
    outbox.put(Urgency.POOL, lambda: gate.wait(5) and None)
    assert running.wait(5)
    outbox.put(Urgency.POOL, lambda: None)
    outbox.put(Urgency.HANDOFF, lambda: None)
    while len(outbox) > 2:  # the one that waits at the gate is not counted
        time.sleep(0.001)
    assert len(outbox) == 2
    gate.set()
