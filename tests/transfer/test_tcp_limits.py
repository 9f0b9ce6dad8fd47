"""Connections that say nothing: few, not for long, and never in the way of those who have something to ask."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from guarded_port import Port, many_ports
from waiting import HANG_S, wait_until

from moonpool.base.errors import Overloaded, PeerLost
from moonpool.transfer.transports.tcp import lanes, server
from moonpool.transfer.transports.tcp.frames import FrameOp, Request, pack_request
from moonpool.transfer.transports.tcp.guard import Guard

READ = pack_request(Request(FrameOp.READ, 1, "seg", 1, 0, 1))
ANSWER_NBYTES = 33


@pytest.fixture
def ports() -> Iterator[Callable[..., Port]]:
    with many_ports() as make:
        yield make


def is_over(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_silent_connections_are_few_and_in_nobodys_way(ports: Callable[..., Port]) -> None:
    port = ports(None, max_connections=4)
    with ExitStack() as stack:
        silent = [stack.enter_context(port.connect()) for _ in range(3 * Guard.max_unproven)]
        port.remote(None).read_into(0, [bytearray(10)], timeout_s=HANG_S)
        assert port.server.num_connections <= Guard.max_unproven + 4
        assert port.server.ended["pushed out"] >= len(silent) - Guard.max_unproven
        assert is_over(silent[0])


def test_a_first_request_has_little_time_to_come(ports: Callable[..., Port], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_FIRST_REQUEST_S", 0.05)
    port = ports(None)
    with port.connect() as silent:
        assert is_over(silent)
    wait_until(lambda: port.server.ended["silent"] == 1 and port.server.num_connections == 0, "the silent one ends")


def test_a_first_request_that_begins_and_stalls_is_ended_too(ports: Callable[..., Port]) -> None:
    port = ports(None, stall_timeout_s=0.05)
    with port.connect() as trickling:
        trickling.sendall(READ[:3])
        assert is_over(trickling)
    wait_until(lambda: port.server.ended["stalled"] == 1 and port.server.num_connections == 0, "the stalled one ends")


def test_an_idle_connection_is_let_go(ports: Callable[..., Port]) -> None:
    port = ports(None, idle_timeout_s=0.05)
    with port.connect() as sock:
        sock.sendall(READ)
        assert len(sock.recv(ANSWER_NBYTES, socket.MSG_WAITALL)) == ANSWER_NBYTES
        assert is_over(sock)
    wait_until(lambda: port.server.ended["silent"] == 1, "the silent one ends")


def test_the_longest_idle_one_makes_room(ports: Callable[..., Port], monkeypatch: pytest.MonkeyPatch) -> None:
    port = ports(None, max_connections=2)
    monkeypatch.setattr(server, "_LEAST_IDLE_S", 1e9)

    def num_idle() -> int:
        return sum(caller.idle_s() > 0 and caller.proven for caller in list(port.server._callers))

    with port.connect() as first, port.connect() as second:
        for sock in (first, second):
            sock.sendall(READ)
            assert len(sock.recv(ANSWER_NBYTES, socket.MSG_WAITALL)) == ANSWER_NBYTES
            wait_until(lambda: num_idle() == (1 if port.server.num_proven() == 1 else 2), "one lane of each is idle")
        remote = port.remote(None)
        with pytest.raises((Overloaded, PeerLost)):  # they were used not long ago
            remote.read_into(0, [bytearray(10)], timeout_s=HANG_S)
        monkeypatch.setattr(server, "_LEAST_IDLE_S", 0.0)
        remote.read_into(0, [bytearray(10)], timeout_s=HANG_S)
        assert is_over(first)
        second.sendall(READ)
        assert len(second.recv(ANSWER_NBYTES, socket.MSG_WAITALL)) == ANSWER_NBYTES


def test_callers_drop_a_lane_before_its_owner_does(ports: Callable[..., Port], monkeypatch: pytest.MonkeyPatch) -> None:
    assert lanes.IDLE_S < server.IDLE_TIMEOUT_S
    port = ports(None)
    remote = port.remote(None)
    monkeypatch.setattr(lanes, "IDLE_S", 0.0)
    for _ in range(3):
        remote.read_into(0, [bytearray(10)], timeout_s=HANG_S)
    wait_until(lambda: port.server.ended["closed"] == 2, "both are closed")
