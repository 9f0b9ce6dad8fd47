"""The inbox gives out the bytes that came, however they came and were asked for, and in few calls of the kernel."""

from __future__ import annotations

import random
import socket
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import HANG_S

from moonpool.base.clock import Deadline
from moonpool.transfer.transports.tcp.streams import INBOX_NBYTES, Inbox

HEAD = b"0123456789abcdef"


class CountingSocket(socket.socket):
    num_receives = 0

    def recv_into(self, *arguments: Any) -> int:
        self.num_receives += 1
        return super().recv_into(*arguments)

    def recvmsg_into(self, *arguments: Any) -> Any:
        self.num_receives += 1
        return super().recvmsg_into(*arguments)


def pair() -> tuple[CountingSocket, socket.socket]:
    one, other = socket.socketpair()
    return CountingSocket(fileno=one.detach()), other


def receive(sock: socket.socket, messages: list[bytes], cuts: int) -> list[bytes]:
    """As a pipeline does: head, data in a few pieces, the next head."""
    inbox, deadline, found = Inbox(sock, INBOX_NBYTES), Deadline(HANG_S), []
    for number, message in enumerate(messages, 1):
        inbox.receive(len(HEAD), deadline)
        assert inbox.take(len(HEAD)) == HEAD
        data = bytearray(len(message))
        step = max(len(data) // cuts, 1)
        views = [memoryview(data)[at : at + step] for at in range(0, len(data), step)]
        inbox.fill(views, len(HEAD) if number < len(messages) else 0, deadline)
        inbox.expect(len(message))
        found.append(bytes(data))
    assert inbox.nbytes == 0
    return found


sizes_ = st.lists(st.one_of(st.integers(0, 5000), st.integers(60_000, 70_000), st.just(300_000)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(sizes_, st.integers(1, 5), st.integers(1, 200_000), st.integers(0, 99))
def test_every_byte_in_its_place(sizes: list[int], cuts: int, chunk_nbytes: int, seed: int) -> None:
    chance = random.Random(seed)
    messages = [chance.randbytes(size) for size in sizes]
    stream = b"".join(HEAD + message for message in messages)
    sock, other = pair()

    def send() -> None:
        for at in range(0, len(stream), chunk_nbytes):
            other.sendall(stream[at : at + chunk_nbytes])

    chunk_nbytes = max(chunk_nbytes, len(stream) // 200)
    sender = threading.Thread(target=send)
    sender.start()
    with sock, other:
        assert receive(sock, messages, cuts) == messages
        sender.join()


@pytest.mark.parametrize(("size", "most"), [(4096, 0.2), (16_384, 0.4), (65_536, 1.5), (1 << 20, 1.5)])
def test_calls_of_the_kernel_per_message(size: int, most: float) -> None:
    messages = [bytes([number % 256]) * size for number in range(50)]
    sock, other = pair()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    with sock, other:
        if size * len(messages) < 1 << 20:  # all here before the first is taken
            other.sendall(b"".join(HEAD + message for message in messages))
            assert receive(sock, messages, 1) == messages
        else:
            sender = threading.Thread(target=other.sendall, args=(b"".join(HEAD + message for message in messages),))
            sender.start()
            assert receive(sock, messages, 1) == messages
            sender.join()
        print(f"{sock.num_receives / len(messages):.2f} calls per message of {size} bytes")
        assert sock.num_receives <= most * len(messages) + 2
