"""Batches to a peer with several paths, which no thread waits for, over paths that fail on purpose."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from plan_world import FAST
from slow_remote import FakeRemote
from waiting import HANG_S

from moonpool.base.errors import Cancelled, DeadlineExceeded, InvalidInput, PeerLost
from moonpool.transfer.batch import Batch, TransferOp, TransferRequest
from moonpool.transfer.paths.multipath import MultiPathRemote
from moonpool.transfer.paths.peer_paths import PeerPaths
from moonpool.transfer.paths.slice_queue import SliceOrder, SliceQueue

Before = Callable[[list[tuple[int, int]]], None]
NBYTES = 200_000


@pytest.fixture
def queue() -> Iterator[SliceQueue[Batch]]:
    before = set(threading.enumerate())
    made: SliceQueue[Batch] = SliceQueue(SliceOrder(1000, threads_per_peer=2))
    yield made
    made.close()
    made.join(HANG_S)
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name == "transfer-slices"]


@pytest.fixture
def make_paths(queue: SliceQueue[Batch]) -> Callable[..., tuple[MultiPathRemote, bytearray]]:

    def make(*befores: Before) -> tuple[MultiPathRemote, bytearray]:
        paths = PeerPaths[Batch]([f"fake:{number}" for number in range(len(befores))], FAST)
        memory = bytearray(random.Random(5).randbytes(NBYTES))
        remotes = [FakeRemote(NBYTES, before) for before in befores]
        for each in remotes:
            each.memory = memory
        remote = MultiPathRemote(queue, paths, NBYTES, [opener(each) for each in remotes])
        remote.connect(5.0)
        return remote, memory

    return make


def opener(remote: FakeRemote) -> Callable[[float], FakeRemote]:
    return lambda timeout_s: remote


def fine(spans: list[tuple[int, int]]) -> None:
    pass


def silent(spans: list[tuple[int, int]]) -> None:
    time.sleep(FAST.slice_timeout_s)
    raise DeadlineExceeded("silence")


def read(remote: MultiPathRemote, buffer: bytearray, offset: int = 0, timeout_s: float = 30.0) -> Batch:
    batch = Batch([TransferRequest(TransferOp.READ, remote, offset, [buffer])], timeout_s=timeout_s, slice_nbytes=4096)
    batch.start(remote._queue, 0.0)
    return batch


def test_random_faults_and_cancellations_lose_no_byte(
    make_paths: Callable[..., tuple[MultiPathRemote, bytearray]],
) -> None:
    chance = random.Random(7)

    def flaky(spans: list[tuple[int, int]]) -> None:
        if chance.random() < 0.2:
            raise PeerLost("a cable was pulled")
        if chance.random() < 0.02:
            silent(spans)

    remote, memory = make_paths(flaky, fine, flaky)
    for _ in range(5):
        moving = []
        for number in range(20):
            offset, buffer = number * 1000, bytearray(chance.choice([10, 5000, 100_000]))
            moving.append((offset, buffer, read(remote, buffer, offset)))
        for number, (_, _, pending) in enumerate(moving):
            if number % 5 == 0:
                pending.cancel()
        for offset, buffer, pending in moving:
            assert pending.done_within(HANG_S)
            if pending.failure is None:
                assert buffer == memory[offset : offset + len(buffer)]
            else:
                assert isinstance(pending.failure, Cancelled)
        assert sum(pending.failure is None for _, _, pending in moving) >= 16
        assert all(path.in_flight_nbytes == 0 for path in remote.report())


def test_silence_everywhere_ends_at_the_deadline(
    make_paths: Callable[..., tuple[MultiPathRemote, bytearray]],
) -> None:
    remote, _ = make_paths(silent, silent)
    started_s = time.monotonic()
    pending, sooner = read(remote, bytearray(NBYTES), timeout_s=1.6), read(remote, bytearray(10), timeout_s=0.3)
    later = read(remote, bytearray(10), timeout_s=5 * HANG_S)
    for each, timeout_s in ((sooner, 0.25), (pending, 1.5)):
        with pytest.raises(DeadlineExceeded):
            each.wait(HANG_S)
        assert timeout_s < time.monotonic() - started_s < HANG_S / 2
    later.cancel()
    assert later.done_within(HANG_S)


def test_paths_are_probed_though_nobody_waits(make_paths: Callable[..., tuple[MultiPathRemote, bytearray]]) -> None:
    broken = True

    def sick(spans: list[tuple[int, int]]) -> None:
        if broken:
            silent(spans)

    remote, memory = make_paths(sick, sick)
    buffer = bytearray(NBYTES)
    pending = read(remote, buffer)
    assert not pending.done_within(0.3)
    broken = False
    pending.wait(HANG_S)
    assert buffer == memory


def test_cancel_ends_what_waits_for_paths_that_rest(
    make_paths: Callable[..., tuple[MultiPathRemote, bytearray]],
) -> None:
    remote, _ = make_paths(silent, silent)
    pending = read(remote, bytearray(NBYTES))
    assert not pending.done_within(0.15)
    pending.cancel()
    with pytest.raises(Cancelled):
        pending.wait(HANG_S)


def test_what_can_be_said_at_once_is(make_paths: Callable[..., tuple[MultiPathRemote, bytearray]]) -> None:
    remote, _ = make_paths(fine)
    with pytest.raises(InvalidInput):
        remote.read_many([(0, bytearray(1)), (NBYTES, bytearray(1))], timeout_s=HANG_S)
    assert sum(path.done_nbytes for path in remote.report()) == 0
    remote.close()
    with pytest.raises(PeerLost):
        remote.read_into(0, [bytearray(1)], timeout_s=HANG_S)
    with pytest.raises(PeerLost):
        read(remote, bytearray(1)).wait(HANG_S)
