"""A lane that failed takes its unsent bytes with it; a lane that did well is used again."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest
from waiting import HANG_S, wait_until

from moonpool.base.clock import Deadline
from moonpool.transfer.transports.sockets import send_all
from moonpool.transfer.transports.tcp.lanes import LanePool


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def test_what_a_failed_lane_had_not_sent_is_never_delivered(listener: socket.socket) -> None:
    """A write given up after its deadline must not land when the silent peer reads on at last."""
    pool = LanePool("127.0.0.1", listener.getsockname()[1], 1)
    data = bytearray(64 << 20)  # more than all buffers on the way
    with pytest.raises(TimeoutError):
        write(pool, data)
    peer, _ = listener.accept()
    with peer, pytest.raises(ConnectionResetError):
        read_to_the_end(peer)
    pool.close()


def write(pool: LanePool, data: bytearray) -> None:
    with pool.lane(HANG_S) as lane:
        send_all(lane, [memoryview(data)], Deadline(0.2))


def read_to_the_end(peer: socket.socket) -> None:
    """Returns when the stream ends as if all of it had been meant."""
    while peer.recv(1 << 20):
        pass


def test_a_healthy_lane_is_used_again(listener: socket.socket) -> None:
    pool = LanePool("127.0.0.1", listener.getsockname()[1], 2)
    with pool.lane(HANG_S) as first:
        pass
    with pool.lane(HANG_S) as second:
        assert second is first
    pool.close()


def test_a_caller_waits_for_busy_lanes_longer_than_for_a_silent_peer(listener: socket.socket) -> None:
    pool = LanePool("127.0.0.1", listener.getsockname()[1], 1)
    with ThreadPoolExecutor() as threads:
        with pool.lane(HANG_S) as first:
            waiting = threads.submit(use, pool)
            wait_until(lambda: pool.num_waiting == 1, "one waits")
            time.sleep(3 * SHORT_S)
        assert waiting.result() is first
    pool.close()


def test_a_caller_waits_no_longer_than_for_a_silent_peer_when_a_lane_has_failed(listener: socket.socket) -> None:
    pool, done = LanePool("127.0.0.1", listener.getsockname()[1], 2), threading.Event()
    with ThreadPoolExecutor() as threads, pool.lane(HANG_S):
        failing = pool.take(HANG_S)
        waiting = [threads.submit(hold, pool, done) for _ in range(2)]
        wait_until(lambda: pool.num_waiting == 2, "two wait")
        pool.give_back(failing, healthy=False)
        over, other = wait(waiting, return_when=FIRST_COMPLETED)
        done.set()
        assert type(over.pop().exception()) is TimeoutError
        assert other.pop().exception() is None, "it has connected again"
    pool.close()


SHORT_S = 0.1
HOLD_S = 1.0  # a new connection has as long, and a host may stall for half of it


def use(pool: LanePool) -> socket.socket:
    with pool.lane(SHORT_S) as lane:
        return lane


def hold(pool: LanePool, done: threading.Event) -> None:
    with pool.lane(HOLD_S):
        done.wait()
