"""Owners in processes of their own, stopped, restarted and killed."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from forked_script import ForkServer, fork_server
from waiting import HANG_S

from moonpool.base.checksum import crc32c
from moonpool.base.errors import DeadlineExceeded, NotFound, PeerLost, StaleGeneration
from moonpool.transfer import SegmentDescriptor, TransferConfig, TransferEngine

NBYTES = 16 << 20  # more than sockets hold
WAYS = pytest.mark.parametrize("way", ["shm", "tcp"])


class OwnerProcess:
    """One running segment_owner.py."""

    def __init__(self, forks: ForkServer, run_dir: Path, *, incarnation: int = 1, tcp_port: int = 0) -> None:
        self.process = forks.start(str(run_dir), str(NBYTES), str(incarnation), str(tcp_port), "65536")
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.descriptor = msgspec.json.decode(line, type=SegmentDescriptor)

    def only(self, way: str) -> SegmentDescriptor:
        kept = tuple(e for e in self.descriptor.endpoints if e.startswith(f"{way}:"))
        return msgspec.structs.replace(self.descriptor, endpoints=kept)

    @property
    def tcp_port(self) -> int:
        return int(self.only("tcp").endpoints[0].rpartition(":")[2])

    def checksum(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("crc\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()

    def stop(self) -> None:
        """Returns when no thread of the process runs any more."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with fork_server(Path(__file__).with_name("segment_owner.py")) as server:
        yield server


@pytest.fixture
def owner(forks: ForkServer, tmp_path: Path) -> Iterator[OwnerProcess]:
    made = OwnerProcess(forks, tmp_path)
    yield made
    made.close()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[TransferEngine]:
    with TransferEngine(TransferConfig(run_dir=str(tmp_path / "own"), tcp_host=None)) as made:
        yield made


@WAYS
def test_bytes_cross_the_process_border(owner: OwnerProcess, engine: TransferEngine, way: str) -> None:
    remote = engine.open(owner.only(way))
    assert remote.transport == way
    expected = bytearray(np.random.default_rng(1).bytes(NBYTES))
    back = bytearray(NBYTES)
    remote.read_into(0, [back], timeout_s=HANG_S)
    assert back == expected
    expected[1000:5000] = b"w" * 4000
    remote.write_from(1000, [b"w" * 1500, b"w" * 2500], generation=2, timeout_s=HANG_S)
    assert owner.checksum() == crc32c(expected)
    with pytest.raises(StaleGeneration):
        remote.write_from(60_000, [b"late" * 2000], generation=1, timeout_s=HANG_S)
    assert owner.checksum() == crc32c(expected)


def test_the_fence_is_one_for_all_ways(owner: OwnerProcess, tmp_path: Path) -> None:
    with (
        TransferEngine(TransferConfig(run_dir=str(tmp_path / "a"), tcp_host=None)) as first,
        TransferEngine(TransferConfig(run_dir=str(tmp_path / "b"), tcp_host=None)) as second,
    ):
        by_shm, by_tcp = first.open(owner.only("shm")), second.open(owner.only("tcp"))
        by_shm.write_from(0, [b"x"], generation=5, timeout_s=HANG_S)
        with pytest.raises(StaleGeneration):
            by_tcp.write_from(0, [b"y"], generation=4, timeout_s=HANG_S)
        by_tcp.write_from(0, [b"y"], generation=6, timeout_s=HANG_S)
        with pytest.raises(StaleGeneration):
            by_shm.write_from(0, [b"x"], generation=5, timeout_s=HANG_S)


@WAYS
@pytest.mark.parametrize("op", ["read", "write"])
def test_killed_in_the_middle(forks: ForkServer, tmp_path: Path, way: str, op: str) -> None:
    """Every caller has an error within 2 s, and nothing is left behind."""
    gc.collect()  # what earlier tests left to the collector must not be counted now and be gone later
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for turn in range(3):
        kill_in_the_middle(forks, tmp_path / str(turn), way, op)
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= fds


def kill_in_the_middle(forks: ForkServer, run_dir: Path, way: str, op: str) -> None:
    run_dir.mkdir()
    owner = OwnerProcess(forks, run_dir)
    ended: list[float] = []
    moving = threading.Semaphore(0)
    with TransferEngine(TransferConfig(run_dir=str(run_dir / "own"), tcp_host=None)) as engine:
        remote = engine.open(owner.only(way))

        def move() -> None:
            buffer = bytearray(NBYTES // 2)
            with contextlib.suppress(PeerLost):
                while True:
                    if op == "read":
                        remote.read_into(0, [buffer], timeout_s=5 * HANG_S)
                    else:
                        remote.write_from(0, [buffer], generation=1, timeout_s=5 * HANG_S)
                    moving.release()
            ended.append(time.monotonic())

        callers = [threading.Thread(target=move) for _ in range(3)]
        for caller in callers:
            caller.start()
        assert moving.acquire(timeout=HANG_S)
        owner.kill()
        killed_at = time.monotonic()
        for caller in callers:
            caller.join(HANG_S)
        assert len(ended) == 3
        assert max(ended) - killed_at < HANG_S / 2
    owner.close()


@WAYS
def test_a_restarted_owner_voids_old_handles(
    forks: ForkServer, tmp_path: Path, engine: TransferEngine, way: str
) -> None:
    first = OwnerProcess(forks, tmp_path)
    remote = engine.open(first.only(way))
    remote.read_into(0, [bytearray(1)], timeout_s=HANG_S)
    first.kill()
    first.close()
    with pytest.raises(PeerLost):
        remote.read_into(0, [bytearray(1)], timeout_s=HANG_S)
    second = OwnerProcess(forks, tmp_path, incarnation=2, tcp_port=first.tcp_port)
    try:
        with pytest.raises((NotFound, PeerLost)):
            remote.read_into(0, [bytearray(1)], timeout_s=HANG_S)
        fresh = engine.open(second.only(way))
        assert fresh is not remote
        buffer = bytearray(100)
        fresh.read_into(0, [buffer], timeout_s=HANG_S)
        assert buffer == np.random.default_rng(2).bytes(100)
    finally:
        second.close()


def test_a_stopped_owner_costs_the_deadline_and_may_come_back(owner: OwnerProcess, engine: TransferEngine) -> None:
    by_tcp = engine.open(owner.only("tcp"))
    by_tcp.read_into(0, [bytearray(1)], timeout_s=HANG_S)
    owner.stop()
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        by_tcp.read_into(0, [bytearray(NBYTES)], timeout_s=0.3)
    with pytest.raises(DeadlineExceeded):
        by_tcp.write_from(0, [bytearray(NBYTES)], generation=1, timeout_s=0.3)
    assert time.monotonic() - started < HANG_S / 2
    owner.resume()
    by_tcp.read_into(0, [bytearray(NBYTES)], timeout_s=HANG_S)


def test_mapping_from_a_stopped_owner_has_a_deadline_too(
    owner: OwnerProcess, engine: TransferEngine, tmp_path: Path
) -> None:
    owner.stop()
    with TransferEngine(TransferConfig(run_dir=str(tmp_path / "hasty"), tcp_host=None, timeout_s=0.3)) as hasty:
        with pytest.raises(DeadlineExceeded):
            hasty.open(owner.only("shm"))
    owner.resume()
    engine.open(owner.only("shm")).read_into(0, [bytearray(10)], timeout_s=HANG_S)


def test_an_owner_ends_with_its_input(owner: OwnerProcess, tmp_path: Path) -> None:
    assert owner.process.stdin is not None
    owner.process.stdin.close()
    assert owner.process.wait(HANG_S) == 0
    assert not list(tmp_path.glob("*.sock"))
