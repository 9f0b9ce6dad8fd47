"""What fuzz tests stand on: batches that can be replayed, a watch over memory, threads, descriptors and errors."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import secrets
import select
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from hostile_bytes import Hostile, batches, replayable

SOAK = 80
LIMIT_NBYTES = 12 << 20  # all that one batch may have allocated at one time, the test's own needs included
scale = pytest.mark.parametrize("times", [1, pytest.param(SOAK, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])


@pytest.fixture(autouse=True)
def nothing_left_and_nothing_said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread, descriptor, unhandled exception or logged error when the test is over."""
    unhandled: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: unhandled.append(repr(args.exc_value)))
    said = _Errors()
    logging.getLogger().addHandler(said)
    gc.collect()
    threads, fds = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield
    logging.getLogger().removeHandler(said)
    gc.collect()
    assert not unhandled, unhandled
    assert not said.messages, said.messages
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= fds


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < LIMIT_NBYTES, f"{peak_nbytes} bytes were allocated at one time"


def run_batches(num_frames: int, times: int, run: Callable[[Hostile], int]) -> None:
    """Runs batches until so many frames were fed, so many times. In soak the seed is a new one each time."""
    seed, numbers = batches(secrets.randbits(32) if times > 1 else 20261115)
    fed = 0
    for batch in numbers:
        with replayable(seed, batch), bounded_memory():
            fed += run(Hostile(random.Random(f"{seed}:{batch}")))
        if fed >= num_frames * times:
            return


def converse(sock: socket.socket, said: bytes) -> bytes:
    """Sends all of it and takes what comes back, at the same time, until the other side is done."""
    sock.setblocking(False)
    poller = select.poll()
    poller.register(sock, select.POLLIN | select.POLLOUT)
    heard, left = bytearray(), memoryview(said + b".")  # the last byte stands for the end
    with contextlib.suppress(ConnectionError):
        while True:
            assert poller.poll(10_000), "the owner neither answers nor hangs up"
            with contextlib.suppress(BlockingIOError):
                if not (data := sock.recv(1 << 16)):
                    break
                heard += data
            if left.nbytes > 1:
                with contextlib.suppress(BlockingIOError):
                    left = left[sock.send(left[:-1]) :]
            elif left.nbytes:
                left = left[1:]
                poller.modify(sock, select.POLLIN)
                with contextlib.suppress(OSError):  # reset meanwhile
                    sock.shutdown(socket.SHUT_WR)
    return bytes(heard)
