"""engine.submit() to a peer with several paths: priorities, cancellation and bounds, over real sockets."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from waiting import HANG_S

from moonpool.base.errors import PeerLost, StaleGeneration
from moonpool.transfer import (
    Batch,
    MultiPathRemote,
    Priority,
    RemoteSegment,
    Segment,
    SegmentDescriptor,
    TransferConfig,
    TransferEngine,
    TransferOp,
    TransferRequest,
    TransferStatus,
)
from moonpool.transfer.paths.path_load import PlanConfig
from moonpool.transfer.transports.tcp.transport import TcpRemote

READ, WRITE = TransferOp.READ, TransferOp.WRITE
DONE, CANCELLED = TransferStatus.DONE, TransferStatus.CANCELLED
KIB, MIB = 1 << 10, 1 << 20
LAB = str(Path(__file__).parents[2] / "benchmarks" / "_rails_lab.py")


def config(tmp_path: Path, **others: object) -> TransferConfig:
    return TransferConfig(**{"run_dir": str(tmp_path), "tcp_host": None, "shm": False} | others)  # type: ignore[arg-type]


def reads(remote: RemoteSegment, count: int, nbytes: int) -> list[TransferRequest]:
    return [TransferRequest(READ, remote, n * nbytes, [bytearray(nbytes)]) for n in range(count)]


def statuses(batch: Batch) -> list[TransferStatus]:
    return [batch.status(n) for n in range(len(batch))]


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[tuple[TransferEngine, MultiPathRemote, Segment]]:
    with (
        Segment.allocate("seg", 32 * MIB, granule_nbytes=4096, incarnation=1) as segment,
        TransferEngine(config(tmp_path, tcp_host="127.0.0.1", tcp_hosts=("127.0.0.2",))) as owner,
        TransferEngine(config(tmp_path)) as peer,
    ):
        remote = peer.open(owner.serve(segment))
        assert isinstance(remote, MultiPathRemote)
        yield peer, remote, segment


Paths = tuple[TransferEngine, MultiPathRemote, Segment]


def test_several_paths_small_and_large_together(paths: Paths) -> None:
    peer, remote, segment = paths
    data = np.random.default_rng(1).integers(0, 256, segment.nbytes, dtype=np.uint8)
    large = [TransferRequest(WRITE, remote, 0, [data[: 24 * MIB]], 1)]
    small = [
        TransferRequest(WRITE, remote, at, [data[at : at + 100], data[at + 100 : at + 4 * KIB]], 1)
        for at in range(24 * MIB, 32 * MIB, 4 * KIB)
    ]
    peer.submit([*large, *small, TransferRequest(WRITE, remote, 0, [])], notify=b"written").wait(HANG_S)
    assert bytes(segment.memory) == data.tobytes()
    back = np.zeros_like(data)
    batch = peer.submit(
        [TransferRequest(READ, remote, at, [back[at : at + MIB // 2]]) for at in range(0, 32 * MIB, MIB // 2)]
    )
    batch.wait(HANG_S)
    assert (back == data).all()
    assert set(statuses(batch)) == {DONE}


def test_several_paths_and_one_refused_among_many(paths: Paths) -> None:
    peer, remote, segment = paths
    assert segment.fence is not None
    segment.fence.stamp(5 * 4096, 1, 9)
    batch = peer.submit([TransferRequest(WRITE, remote, n * 4096, [bytes([n]) * 4096], 1) for n in range(10)])
    with pytest.raises(StaleGeneration):
        batch.wait(HANG_S)
    assert [n for n in range(10) if batch.status(n) is not DONE] == [5]
    assert all(segment.memory[n * 4096] == (0 if n == 5 else n) for n in range(10))


def test_several_paths_cancelled_in_the_middle(paths: Paths) -> None:
    peer, remote, segment = paths
    segment.memory[:] = b"\x05" * segment.nbytes
    chance = random.Random(1)
    for _ in range(20):
        buffers = [bytearray(16 * MIB), bytearray(16 * MIB), bytearray(4 * KIB)]
        batch = peer.submit([TransferRequest(READ, remote, 0, [buffer]) for buffer in buffers])
        time.sleep(chance.random() * 0.01)
        batch.cancel()
        assert batch.done_within(HANG_S)
        assert all(path.in_flight_nbytes == 0 for path in remote.report())
        for number, buffer in enumerate(buffers):
            assert batch.status(number) in (DONE, CANCELLED)
            assert batch.status(number) is not DONE or buffer == b"\x05" * len(buffer)
    peer.submit(reads(remote, 8, 4 * KIB)).wait(HANG_S)


def test_several_paths_let_a_hand_off_through(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large transfers by several paths hold no thread of the engine and no place at the head of the queue: when the
    first of their slices has ended, the hand-off is next.
    """
    begun, go_on, read_into = threading.Semaphore(0), threading.Semaphore(0), TcpRemote.read_into

    def read_step_by_step(
        self: TcpRemote, offset: int, buffers: Sequence[memoryview | bytearray], *, timeout_s: float
    ) -> None:
        if sum(len(buffer) for buffer in buffers) > 40 * KIB:
            begun.release()
            assert go_on.acquire(timeout=HANG_S)
        read_into(self, offset, buffers, timeout_s=timeout_s)

    monkeypatch.setattr(TcpRemote, "read_into", read_step_by_step)
    peer, remote, _ = paths
    large = [TransferRequest(READ, remote, 0, [bytearray(32 * MIB)]) for _ in range(4)]
    bulk = [peer.submit(large, priority=Priority.REPLICATION, timeout_s=5 * HANG_S) for _ in range(4)]
    for _ in range(2 * PlanConfig.slices_per_path):  # those of two paths
        assert begun.acquire(timeout=HANG_S)
    hand_off = peer.submit(reads(remote, 10, 4 * KIB), priority=Priority.HANDOFF, timeout_s=5 * HANG_S)
    go_on.release()
    hand_off.wait(HANG_S)
    for batch in bulk:
        batch.cancel()
    go_on.release(1000)
    for batch in bulk:
        assert batch.done_within(HANG_S)


def test_several_paths_count_against_the_bound(tmp_path: Path) -> None:
    with (
        Segment.allocate("seg", MIB, incarnation=1) as segment,
        TransferEngine(config(tmp_path, tcp_host="127.0.0.1", tcp_hosts=("127.0.0.2",))) as owner,
        TransferEngine(config(tmp_path, max_queued_slices=4)) as peer,
    ):
        remote = peer.open(owner.serve(segment))
        batches = [peer.submit(reads(remote, 4, 64), timeout_s=HANG_S) for _ in range(50)]  # waits for those before
        batches.append(peer.submit(reads(remote, 100, 64)))
        batches[-1].wait(HANG_S)
        batches.append(peer.submit(reads(remote, 4, 64), room_timeout_s=0.0))
        batches[-1].wait(HANG_S)
        assert {status for batch in batches for status in statuses(batch)} == {DONE}


def test_closing_ends_what_runs_by_several_paths(paths: Paths) -> None:
    peer, remote, _ = paths
    batches = [peer.submit([TransferRequest(READ, remote, 0, [bytearray(32 * MIB)])]) for _ in range(6)]
    peer.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("transfer-slices")]
    for batch in batches:
        assert batch.done_within(HANG_S)
    with pytest.raises(PeerLost):
        batches[-1].wait(0)


def test_a_killed_owner_ends_every_batch_at_once(tmp_path: Path) -> None:
    command = [sys.executable, LAB, "owner", str(tmp_path), "127.0.0.1", "127.0.0.2"]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
        TransferEngine(config(tmp_path)) as peer,
    ):
        assert process.stdout is not None
        remote = peer.open(msgspec.json.decode(process.stdout.readline(), type=SegmentDescriptor))
        batches = [
            peer.submit([TransferRequest(READ, remote, 0, [bytearray(16 * MIB)])], timeout_s=5 * HANG_S)
            for _ in range(16)
        ]
        batches[0].wait(HANG_S)
        process.kill()
        killed_s = time.monotonic()
        for batch in batches:
            assert batch.done_within(HANG_S)
        assert time.monotonic() - killed_s < HANG_S / 2
        with pytest.raises(PeerLost):
            peer.submit(reads(remote, 10, 64)).wait(HANG_S)
