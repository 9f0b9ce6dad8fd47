"""Owners killed with -9 in the middle of transfers, again and again: errors in time, nothing left behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from nursery import Nursery, kill_under
from waiting import HANG_S

from moonpool.base.errors import PeerLost
from moonpool.transfer import RemoteSegment, SegmentDescriptor, Transport
from moonpool.transfer.transports.shm.transport import ShmTransport
from moonpool.transfer.transports.tcp.transport import TcpTransport

NBYTES = 4 << 20
WAYS = pytest.mark.parametrize("way", ["shm", "tcp"])


class Born(msgspec.Struct):
    pid: int
    shm: SegmentDescriptor
    tcp: SegmentDescriptor


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery[Born]]:
    made = Nursery("owner_nursery.py", tmp_path, NBYTES, born=Born)
    yield made
    made.close()


def moves(remote: RemoteSegment, buffer: np.ndarray) -> list[Callable[[], None]]:
    """One of each kind, so that each round's callers are hit in different places."""
    small = [(at, buffer[at : at + 4096]) for at in range(0, NBYTES, 8192)]
    return [
        lambda: remote.read_into(0, [buffer], timeout_s=5 * HANG_S),
        lambda: remote.write_from(0, [buffer], generation=1, timeout_s=5 * HANG_S),
        lambda: remote.read_many(small, timeout_s=5 * HANG_S),
        lambda: remote.write_many(small, generation=1, timeout_s=5 * HANG_S),
    ]


def kill_once(nursery: Nursery[Born], transport: Transport, way: str) -> None:
    owner = nursery.bear()
    descriptor: SegmentDescriptor = getattr(owner, way)
    remote = transport.open(descriptor, descriptor.endpoints[0], timeout_s=HANG_S)
    work = moves(remote, np.zeros(NBYTES, dtype=np.uint8))
    kinds, last_s = kill_under(work, owner.pid)
    remote.close()
    assert kinds == [PeerLost] * len(work)
    assert last_s < HANG_S / 2


def kill_again_and_again(nursery: Nursery[Born], run_dir: Path, way: str, rounds: int) -> None:
    gc.collect()  # what earlier tests left to the collector must not be counted now and be gone later
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    before = mapped_memfds()
    for turn in range(rounds):
        transport = ShmTransport(str(run_dir / "own")) if way == "shm" else TcpTransport(None, lanes=3)
        kill_once(nursery, transport, way)
        transport.close()
        if turn == 4:
            resident = resident_nbytes()  # the allocator has seen all there is to see
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= fds
    gc.collect()
    assert not mapped_memfds() - before
    assert resident_nbytes() - resident < 4 * NBYTES


def mapped_memfds() -> set[str]:
    """Inode and name of every segment mapped here."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=4)[4] for line in lines if "memfd:moonpool" in line}


def resident_nbytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@WAYS
def test_killed_in_the_middle_25_times(nursery: Nursery[Born], tmp_path: Path, way: str) -> None:
    kill_again_and_again(nursery, tmp_path, way, 25)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@WAYS
def test_killed_in_the_middle_500_times(nursery: Nursery[Born], tmp_path: Path, way: str) -> None:
    kill_again_and_again(nursery, tmp_path, way, 500)
