"""Several paths to one peer: over loopback addresses, and over fakes that fail on purpose."""

from __future__ import annotations

import gc
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from plan_world import FAST
from waiting import HANG_S

from moonpool.base.errors import (
    ConfigError,
    DeadlineExceeded,
    Internal,
    InvalidInput,
    MoonpoolError,
    NotFound,
    PeerLost,
    StaleGeneration,
)
from moonpool.transfer import (
    Batch,
    MultiPathRemote,
    RemoteSegment,
    Segment,
    SegmentDescriptor,
    TransferConfig,
    TransferEngine,
    TransferOp,
    TransferRequest,
)
from moonpool.transfer.memory.buffers import Buffer, as_bytes_views
from moonpool.transfer.paths.path_load import PathState
from moonpool.transfer.paths.peer_paths import PeerPaths
from moonpool.transfer.paths.slice_queue import SliceOrder, SliceQueue

NBYTES = 16 << 20
LAB = str(Path(__file__).parents[2] / "benchmarks" / "_rails_lab.py")


def make_engine(tmp_path: Path, *, hosts: tuple[str, ...] = ("127.0.0.2",), shm: bool = False) -> TransferEngine:
    return TransferEngine(TransferConfig(run_dir=str(tmp_path), shm=shm, tcp_hosts=hosts))


def random_bytes(nbytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.allocate("seg", NBYTES, granule_nbytes=4096, incarnation=1) as made:
        yield made


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[TransferEngine]:
    with make_engine(tmp_path / "owner") as made:
        yield made


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[TransferEngine]:
    with TransferEngine(TransferConfig(run_dir=str(tmp_path / "peer"), tcp_host=None)) as made:
        yield made


def open_paths(engine: TransferEngine, descriptor: SegmentDescriptor) -> MultiPathRemote:
    remote = engine.open(descriptor)
    assert isinstance(remote, MultiPathRemote)
    return remote


def test_every_address_is_advertised_and_used(owner: TransferEngine, peer: TransferEngine, segment: Segment) -> None:
    descriptor = owner.serve(segment)
    assert [e.rpartition(":")[0] for e in descriptor.endpoints] == ["tcp:127.0.0.1", "tcp:127.0.0.2"]
    remote = open_paths(peer, descriptor)
    assert peer.open(descriptor) is remote
    data = random_bytes(NBYTES)
    remote.write_from(0, [data[:77], data[77:]], generation=1, timeout_s=HANG_S)
    assert bytes(segment.memory) == data.tobytes()
    back = np.zeros_like(data)
    remote.read_into(0, [back[: NBYTES // 3], back[NBYTES // 3 :]], timeout_s=HANG_S)
    assert (back == data).all()
    report = remote.report()
    assert [path.endpoint for path in report] == list(descriptor.endpoints)
    assert all(path.done_nbytes > 0 and path.in_flight_nbytes == 0 for path in report)
    assert sum(path.done_nbytes for path in report) == 2 * NBYTES


def test_many_pieces(owner: TransferEngine, peer: TransferEngine, segment: Segment) -> None:
    remote = open_paths(peer, owner.serve(segment))
    data = random_bytes(1000 * 4096)
    places = [((number * 7919 % 1000) * 4096, data[number * 4096 :][:4096]) for number in range(1000)]
    remote.write_many(places, generation=1, timeout_s=HANG_S)
    assert all(bytes(segment.memory[at : at + 4096]) == piece.tobytes() for at, piece in places)
    back = np.zeros_like(data)
    remote.read_many([(at, back[n * 4096 :][:4096]) for n, (at, _) in enumerate(places)], timeout_s=HANG_S)
    assert (back == data).all()
    with pytest.raises(InvalidInput):
        remote.read_many([(0, bytearray(1)), (NBYTES, bytearray(1))], timeout_s=HANG_S)


def test_batches_run_on_all_paths(owner: TransferEngine, peer: TransferEngine, segment: Segment) -> None:
    remote = open_paths(peer, owner.serve(segment))
    data = random_bytes(NBYTES)
    half = NBYTES // 2
    requests = [TransferRequest(TransferOp.WRITE, remote, at, [data[at : at + half]], 1) for at in (0, half)]
    batch = peer.submit([*requests, TransferRequest(TransferOp.WRITE, remote, NBYTES, [])])
    batch.wait(HANG_S)
    assert bytes(segment.memory) == data.tobytes()
    assert min(path.done_nbytes for path in remote.report()) > NBYTES // 10


def test_memory_on_this_machine_is_still_shared(tmp_path: Path, segment: Segment) -> None:
    with make_engine(tmp_path, shm=True) as owner, make_engine(tmp_path, shm=True) as near:
        assert near.open(owner.serve(segment)).transport == "shm"


def test_refusals_are_not_retried(owner: TransferEngine, peer: TransferEngine, segment: Segment) -> None:
    descriptor = owner.serve(segment)
    remote = open_paths(peer, descriptor)
    remote.write_from(0, [b"new"], generation=9, timeout_s=HANG_S)
    with pytest.raises(StaleGeneration):
        remote.write_from(0, [bytes(4 << 20)], generation=1, timeout_s=HANG_S)
    assert bytes(segment.memory[:3]) == b"new"
    with pytest.raises(InvalidInput):
        remote.read_into(NBYTES, [bytearray(1)], timeout_s=HANG_S)
    with pytest.raises(NotFound):
        peer.open(msgspec.structs.replace(descriptor, incarnation=2))
    owner.unserve("seg")
    with pytest.raises(NotFound):
        remote.read_into(0, [bytearray(4 << 20)], timeout_s=HANG_S)
    assert all(path.state is PathState.UP for path in remote.report())


def test_dead_and_dumb_addresses_are_done_without(
    owner: TransferEngine, peer: TransferEngine, segment: Segment
) -> None:
    good = owner.serve(segment)
    with socket.socket() as dumb, socket.socket() as dead:
        dumb.bind(("127.0.0.1", 0))
        dumb.listen()  # takes connections and never answers
        dead.bind(("127.0.0.1", 0))  # refuses connections
        others = tuple(f"tcp:127.0.0.1:{sock.getsockname()[1]}" for sock in (dumb, dead))
        started_s = time.monotonic()
        remote = open_paths(peer, msgspec.structs.replace(good, endpoints=(*others, good.endpoints[0])))
        for _ in range(5):
            buffer = bytearray(NBYTES)
            remote.read_into(0, [buffer], timeout_s=5 * HANG_S)
            assert buffer == bytes(segment.memory)
        assert time.monotonic() - started_s < HANG_S / 2
        with pytest.raises(PeerLost):
            peer.open(msgspec.structs.replace(good, name="x", endpoints=(others[1], others[1])))


def read_forever(remote: RemoteSegment, buffer: bytearray) -> None:
    while True:
        remote.read_into(0, [buffer], timeout_s=5 * HANG_S)


def test_a_killed_owner_is_noticed_at_once(tmp_path: Path, peer: TransferEngine) -> None:
    command = [sys.executable, LAB, "owner", str(tmp_path), "127.0.0.1", "127.0.0.2"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        remote = open_paths(peer, msgspec.json.decode(process.stdout.readline(), type=SegmentDescriptor))
        killed_s: list[float] = []

        def kill() -> None:
            killed_s.append(time.monotonic())
            process.kill()

        threading.Timer(0.2, kill).start()
        buffer = bytearray(NBYTES)
        with pytest.raises(PeerLost):
            read_forever(remote, buffer)
        assert time.monotonic() - killed_s[0] < HANG_S / 2


def test_close_ends_callers_threads_and_sockets(tmp_path: Path, segment: Segment) -> None:
    gc.collect()  # what earlier tests left to the collector must not be counted now and be gone later
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    owner = make_engine(tmp_path / "owner")
    peer = TransferEngine(TransferConfig(run_dir=str(tmp_path / "peer"), tcp_host=None))
    remote = open_paths(peer, owner.serve(segment))
    errors: list[MoonpoolError] = []

    def read_on() -> None:
        try:
            read_forever(remote, bytearray(NBYTES))
        except MoonpoolError as error:
            errors.append(error)

    callers = [threading.Thread(target=read_on) for _ in range(4)]
    for caller in callers:
        caller.start()
    time.sleep(0.1)  # in the middle
    peer.close()
    for caller in callers:
        caller.join(HANG_S)
    assert len(errors) == 4
    assert all(isinstance(error, PeerLost) for error in errors)
    with pytest.raises(PeerLost):
        remote.read_into(0, [bytearray(1)], timeout_s=1)
    owner.close()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name.startswith("tcp-"):
            thread.join(HANG_S)
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= fds


def test_a_closed_handle_does_not_hurt_its_neighbours(
    owner: TransferEngine, peer: TransferEngine, segment: Segment
) -> None:
    descriptor = owner.serve(segment)
    with Segment.allocate("other", NBYTES, incarnation=1) as other:
        gone = owner.serve(other)
        kept, dropped = open_paths(peer, descriptor), open_paths(peer, gone)
        errors: list[MoonpoolError] = []

        def read_on() -> None:
            try:
                read_forever(dropped, bytearray(NBYTES))
            except MoonpoolError as error:
                errors.append(error)

        reader = threading.Thread(target=read_on)
        reader.start()
        kept.read_into(0, [bytearray(NBYTES)], timeout_s=HANG_S)
        peer.forget(gone)
        reader.join(HANG_S)
        assert len(errors) == 1
        assert isinstance(errors[0], PeerLost)
        assert all(path.state is PathState.UP for path in kept.report())
        kept.read_into(0, [bytearray(NBYTES)], timeout_s=HANG_S)
        owner.unserve("other")


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tcp_hosts"):
        TransferEngine(TransferConfig(run_dir=str(tmp_path), tcp_host=None, tcp_hosts=("127.0.0.1",)))


class FakeRemote(RemoteSegment):
    """Memory reached by a path that does, before each slice, whatever the test says: nothing, wait, raise."""

    transport = "fake"

    def __init__(self, memory: bytearray, before: Callable[[float], None]) -> None:
        self.nbytes = len(memory)
        self._memory = memory
        self._before = before

    def read_into(self, offset: int, buffers: Sequence[Buffer], *, timeout_s: float) -> None:
        self._before(timeout_s)
        for view in as_bytes_views(buffers, writable=True):
            view[:] = self._memory[offset : offset + view.nbytes]
            offset += view.nbytes

    def write_from(self, offset: int, buffers: Sequence[Buffer], *, generation: int, timeout_s: float) -> None:
        self._before(timeout_s)
        for view in as_bytes_views(buffers, writable=False):
            self._memory[offset : offset + view.nbytes] = view
            offset += view.nbytes

    def close(self) -> None:
        pass


@pytest.fixture
def make_paths() -> Iterator[Callable[..., MultiPathRemote]]:
    queue: SliceQueue[Batch] = SliceQueue(SliceOrder(1000, threads_per_peer=2))

    def make(memory: bytearray, *befores: Callable[[float], None]) -> MultiPathRemote:
        paths = PeerPaths[Batch]([f"fake:{number}" for number in range(len(befores))], FAST)
        openers = [lambda timeout_s, before=before: FakeRemote(memory, before) for before in befores]
        remote = MultiPathRemote(queue, paths, len(memory), openers)
        remote.connect(5.0)
        return remote

    yield make
    queue.close()
    queue.join(HANG_S)


def fine(timeout_s: float) -> None:
    pass


def test_random_faults_and_many_callers_lose_no_byte(make_paths: Callable[..., MultiPathRemote]) -> None:
    chance = random.Random(7)

    def flaky(timeout_s: float) -> None:
        if chance.random() < 0.2:
            raise PeerLost("a cable was pulled")
        if chance.random() < 0.02:
            time.sleep(timeout_s)
            raise DeadlineExceeded("silence")

    memory = bytearray(8 * 100_000)
    remote = make_paths(memory, flaky, fine, flaky)
    wrong: list[int] = []

    def write_and_read(number: int) -> None:
        for turn in range(4):
            data, back = random_bytes(100_000, number * 100 + turn).tobytes(), bytearray(100_000)
            remote.write_from(number * 100_000, [data], generation=1, timeout_s=HANG_S)
            remote.read_into(number * 100_000, [back], timeout_s=HANG_S)
            if back != data:
                wrong.append(number)

    callers = [threading.Thread(target=write_and_read, args=(number,)) for number in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(HANG_S)
        assert not caller.is_alive()
    assert not wrong
    assert all(path.done_nbytes > 0 and path.in_flight_nbytes == 0 for path in remote.report())


def test_a_bug_in_a_path_fails_the_call_and_no_more(make_paths: Callable[..., MultiPathRemote]) -> None:
    broken = True

    def buggy(timeout_s: float) -> None:
        if broken:
            raise ZeroDivisionError("a bug")

    remote = make_paths(bytearray(100_000), buggy, buggy)
    with pytest.raises(Internal, match="ZeroDivisionError"):
        remote.read_into(0, [bytearray(100_000)], timeout_s=HANG_S)
    broken = False
    remote.read_into(0, [bytearray(100_000)], timeout_s=HANG_S)


def test_silence_everywhere_ends_at_the_deadline(make_paths: Callable[..., MultiPathRemote]) -> None:
    def silent(timeout_s: float) -> None:
        time.sleep(timeout_s)
        raise DeadlineExceeded("silence")

    remote = make_paths(bytearray(100_000), silent, silent)
    started_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        remote.read_into(0, [bytearray(100_000)], timeout_s=0.5)
    assert 0.4 < time.monotonic() - started_s < HANG_S / 2
