"""What is special about nixl: transfers that cannot be cancelled, agents that are closed under way, dead owners."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nursery import Nursery, kill_under
from waiting import HANG_S, wait_until

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import ConfigError, DeadlineExceeded, MoonpoolError, NotFound, PeerLost, ProtocolError
from moonpool.transfer.control import ControlHandler
from moonpool.transfer.memory.fence import merge_spans
from moonpool.transfer.memory.location import host_id
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.base import RemoteSegment
from moonpool.transfer.transports.nixl import agent as nixl_agent
from moonpool.transfer.transports.nixl.peer import NixlAddress
from moonpool.transfer.transports.nixl.staging import cut_chunks
from moonpool.transfer.transports.nixl.transport import NixlTransport
from moonpool.transfer.transports.tcp.transport import TcpTransport

NBYTES = 16 << 20
T = 10.0
needs_nixl = pytest.mark.skipif(nixl_agent.installed_package() is None, reason="nixl is missing: pip install nixl-cu12")


class Owner(msgspec.Struct):
    pid: int
    descriptor: SegmentDescriptor


class Asker:
    """A transport that only opens, with the tcp transport that carries its questions."""

    def __init__(self, **options: int) -> None:
        self._tcp = TcpTransport(None)
        self.transport = NixlTransport(ControlHandler(), None, self._tcp.line, **options)

    def open(self, descriptor: SegmentDescriptor) -> RemoteSegment:
        return self.transport.open(descriptor, descriptor.endpoints[0], timeout_s=T)

    def close(self) -> None:
        self.transport.close()
        self._tcp.close()


class Offerer:
    """The owner's side, in this process."""

    def __init__(self) -> None:
        self._tcp = TcpTransport("127.0.0.1")
        self.control = self._tcp.control
        self._probe = Segment.over("probe", bytearray(1), incarnation=1)
        self.transport = NixlTransport(self.control, self._tcp.serve(self._probe), self._tcp.line)

    def serve(self, segment: Segment) -> SegmentDescriptor:
        endpoint = self.transport.serve(segment)
        return SegmentDescriptor(
            name=segment.name, nbytes=segment.nbytes, incarnation=1, host=host_id(), endpoints=(endpoint,)
        )

    def close(self) -> None:
        self.transport.close()
        self._tcp.close()
        self._probe.close()


@pytest.fixture
def nursery() -> Iterator[Nursery[Owner]]:
    made = Nursery("nixl_nursery.py", NBYTES, 65536, born=Owner)
    yield made
    made.close()


@pytest.fixture
def asker() -> Iterator[Asker]:
    made = Asker()
    yield made
    made.close()


@pytest.fixture
def offerer() -> Iterator[Offerer]:
    made = Offerer()
    yield made
    made.close()


def write_until_it_fails(remote: RemoteSegment, data: bytes) -> None:
    while True:
        remote.write_from(0, [data], generation=1, timeout_s=0.3)


def contents() -> np.ndarray:
    """What the nursery's owners have."""
    return np.frombuffer(np.random.default_rng(1).bytes(NBYTES), dtype=np.uint8)


@given(
    sizes=st.lists(st.integers(0, 50), max_size=20),
    gaps=st.lists(st.integers(0, 3), min_size=20, max_size=20),
    max_nbytes=st.integers(1, 64),
    max_spans=st.integers(1, 5),
)
def test_chunks_hold_every_byte_once(sizes: list[int], gaps: list[int], max_nbytes: int, max_spans: int) -> None:
    placed, at = [], 0
    for size, gap in zip(sizes, gaps, strict=False):
        placed.append((at, memoryview(bytes((at + n) % 256 for n in range(size)))))
        at += size + gap
    seen: list[tuple[int, int]] = []
    for chunk in cut_chunks(placed, max_nbytes, max_spans):
        places = [offset + n for offset, nbytes in chunk.spans for n in range(nbytes)]
        values = [value for view in chunk.views for value in view]
        assert len(places) == len(values) == chunk.nbytes
        assert 0 < chunk.nbytes <= max_nbytes
        assert len(chunk.spans) <= max_spans
        seen.extend(zip(places, values, strict=True))
    expected = [offset + n for offset, view in placed for n in range(view.nbytes)]
    assert seen == [(place, place % 256) for place in expected]
    spans = merge_spans((offset, view.nbytes) for offset, view in placed)
    assert [offset + n for offset, nbytes in spans for n in range(nbytes)] == expected


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ("moonpool_no_such_package",))
    with pytest.raises(ConfigError, match=r"pip install 'moonpool\[nixl\]'"):
        Asker()
    with pytest.raises(ConfigError, match="not installed"):
        nixl_agent.available_backends()


@needs_nixl
def test_memory_of_a_gpu_is_not_offered(offerer: Offerer) -> None:
    with Segment.over("seg", bytearray(10), incarnation=1, location="cuda:0") as segment:
        assert not offerer.transport.can_serve(segment)


@needs_nixl
def test_the_package_has_ucx() -> None:
    assert nixl_agent.BACKEND in nixl_agent.available_backends()


@needs_nixl
def test_a_process_that_used_it_ends_well_and_prints_nothing() -> None:
    script = "from moonpool.transfer.transports.nixl.agent import Agent; Agent(loopback_only=True).close()"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=HANG_S, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


@needs_nixl
@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense",
        msgspec.msgpack.encode(NixlAddress(b"nonsense", 0, NBYTES, 0, "DRAM", False)),
        msgspec.msgpack.encode(NixlAddress(b"", 0, NBYTES, 0, "DRAM", False)),
    ],
)
def test_an_address_that_makes_no_sense_is_an_error(offerer: Offerer, asker: Asker, answer: bytes) -> None:
    with Segment.allocate("seg", NBYTES, incarnation=1) as segment:
        descriptor = offerer.serve(segment)
        offerer.control.on_attach("nixl", lambda _segment, _hello: answer)
        with pytest.raises((ProtocolError, PeerLost)):
            asker.open(descriptor)


@needs_nixl
def test_a_stopped_owner_costs_no_more_than_the_deadline(nursery: Nursery[Owner], asker: Asker) -> None:
    owner = nursery.bear()
    remote = asker.open(owner.descriptor)
    os.kill(owner.pid, signal.SIGSTOP)
    back = np.full(NBYTES, 7, dtype=np.uint8)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        remote.read_into(0, [back], timeout_s=0.8)
    assert time.monotonic() - started < HANG_S / 2
    before = back.copy()  # a chunk or two may have come while the owner was being stopped
    os.kill(owner.pid, signal.SIGCONT)
    again = np.zeros(NBYTES, dtype=np.uint8)
    remote.read_into(0, [again], timeout_s=T)  # waits for what was given up, so all of it has arrived by now
    assert (again == contents()).all()
    assert (back == before).all()


@needs_nixl
def test_a_write_given_up_does_not_land_on_a_later_one(nursery: Nursery[Owner], asker: Asker) -> None:
    owner = nursery.bear()
    remote = asker.open(owner.descriptor)
    remote.write_from(0, [bytes(100)], generation=1, timeout_s=T)
    stop = threading.Timer(0.005, os.kill, (owner.pid, signal.SIGSTOP))
    stop.start()
    with pytest.raises(DeadlineExceeded):
        write_until_it_fails(remote, b"a" * NBYTES)
    stop.join()  # or it could be stopped after it was told to go on
    os.kill(owner.pid, signal.SIGCONT)
    remote.write_from(0, [b"b" * NBYTES], generation=1, timeout_s=T)
    back = bytearray(NBYTES)
    remote.read_into(0, [back], timeout_s=T)
    assert back == b"b" * NBYTES


@needs_nixl
def test_closing_does_not_wait_for_a_stopped_owner(nursery: Nursery[Owner]) -> None:
    owner, asker = nursery.bear(), Asker()
    remote = asker.open(owner.descriptor)
    os.kill(owner.pid, signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded):
        remote.read_into(0, [bytearray(NBYTES)], timeout_s=0.1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(remote.read_into, 0, [bytearray(NBYTES)], timeout_s=5 * HANG_S)
        time.sleep(0.05)  # so that it most likely waits; it must end either way
        started = time.monotonic()
        asker.close()
        with pytest.raises(PeerLost):
            waiting.result(timeout=HANG_S)
    assert time.monotonic() - started < HANG_S / 2
    with pytest.raises(PeerLost):
        remote.read_into(0, [bytearray(1)], timeout_s=T)


@needs_nixl
def test_one_slot_of_staging_memory_serves_all_callers(offerer: Offerer) -> None:
    asker = Asker(staging_slot_nbytes=10_000, max_staging_slots=1)
    with Segment.allocate("seg", NBYTES, incarnation=1) as segment:
        remote = asker.open(offerer.serve(segment))

        def round_trip(lane: int) -> bool:
            data, back = np.random.default_rng(lane).bytes(100_000), bytearray(100_000)
            remote.write_from(lane * 200_000, [data], generation=1, timeout_s=HANG_S)
            remote.read_into(lane * 200_000, [back], timeout_s=HANG_S)
            return bytes(back) == data

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(round_trip, range(8)))
        asker.close()


@needs_nixl
def test_served_again_it_is_found_again_at_once(offerer: Offerer, asker: Asker) -> None:
    with Segment.allocate("seg", NBYTES, incarnation=1) as segment:
        remote = asker.open(offerer.serve(segment))
        for turn in range(3):
            offerer.transport.unserve("seg")
            offerer.serve(segment)
            remote.write_from(turn, [b"x"], generation=1, timeout_s=T)
        assert bytes(segment.memory[:4]) == b"xxx\0"


@needs_nixl
def test_withdrawn_memory_is_out_of_reach_when_unserve_returns(offerer: Offerer, asker: Asker) -> None:
    """Again and again, in the middle of writes: not a byte changes any more."""
    with Segment.allocate("seg", NBYTES, incarnation=1) as segment:
        remote = asker.open(offerer.serve(segment))
        stop = threading.Event()

        def write() -> set[type[Exception]]:
            data = np.random.default_rng().integers(1, 255, NBYTES, dtype=np.uint8)
            seen: set[type[Exception]] = set()
            while not stop.is_set():
                try:
                    remote.write_from(0, [data], generation=1, timeout_s=T)
                except MoonpoolError as error:
                    seen.add(type(error))
            return seen

        with ThreadPoolExecutor(2) as pool:
            writers = [pool.submit(write) for _ in range(2)]
            for _ in range(10):
                time.sleep(0.02)  # somewhere in the middle
                offerer.transport.unserve("seg")
                before = bytes(segment.memory)
                time.sleep(0.02)
                assert bytes(segment.memory) == before
                offerer.serve(segment)
            stop.set()
            assert set().union(*(writer.result(timeout=HANG_S) for writer in writers)) <= {NotFound, PeerLost}


def moves(remote: RemoteSegment) -> list[Callable[[], None]]:
    """One of each kind, so that each round's callers are hit in different places."""
    buffers = [np.zeros(NBYTES, dtype=np.uint8) for _ in range(2)]
    small = [(at, buffers[0][at : at + 4096]) for at in range(0, NBYTES, 8192)]
    return [
        lambda: remote.read_into(0, [buffers[0]], timeout_s=5 * HANG_S),
        lambda: remote.write_from(0, [buffers[1]], generation=1, timeout_s=5 * HANG_S),
        lambda: remote.read_many(small, timeout_s=5 * HANG_S),
        lambda: remote.write_many(small, generation=1, timeout_s=5 * HANG_S),
    ]


def kill_once(nursery: Nursery[Owner]) -> None:
    owner, asker = nursery.bear(), Asker()
    remote = asker.open(owner.descriptor)
    kinds, last_s = kill_under(moves(remote), owner.pid)
    asker.close()
    assert len(kinds) == 4
    assert all(issubclass(kind, PeerLost) for kind in kinds)
    assert last_s < HANG_S / 2


def kill_again_and_again(nursery: Nursery[Owner], rounds: int) -> None:
    kill_once(nursery)  # what UCX keeps for the life of the process is there now
    gc.collect()
    threads, fds, shm = native_threads(), len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    for turn in range(rounds):
        kill_once(nursery)
        if turn == 2:
            resident = resident_nbytes()
    gc.collect()
    wait_until(
        lambda: native_threads() <= threads, "its threads end"
    )  # a joined thread may need a moment for its last step
    assert len(os.listdir("/proc/self/fd")) <= fds
    left = {name for name in set(os.listdir("/dev/shm")) - shm if name.startswith("ucx")}
    wait_until(
        lambda: not left & set(os.listdir("/dev/shm")), "its files go"
    )  # those of tests that run beside this one go
    assert resident_nbytes() - resident < 4 * NBYTES


def native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def resident_nbytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@needs_nixl
def test_killed_in_the_middle_8_times(nursery: Nursery[Owner]) -> None:
    kill_again_and_again(nursery, 8)


@needs_nixl
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_killed_in_the_middle_200_times(nursery: Nursery[Owner]) -> None:
    kill_again_and_again(nursery, 200)
