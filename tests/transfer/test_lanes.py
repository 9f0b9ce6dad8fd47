"""A lane that failed takes its unsent bytes with it; a lane that did well is used again."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

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
    with pool.lane(Deadline(5)) as lane:
        send_all(lane, [memoryview(data)], Deadline(0.2))


def read_to_the_end(peer: socket.socket) -> None:
    """Returns when the stream ends as if all of it had been meant."""
    while peer.recv(1 << 20):
        pass


def test_a_healthy_lane_is_used_again(listener: socket.socket) -> None:
    pool = LanePool("127.0.0.1", listener.getsockname()[1], 2)
    with pool.lane(Deadline(5)) as first:
        pass
    with pool.lane(Deadline(5)) as second:
        assert second is first
    pool.close()
