from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from waiting import HANG_S

from moonpool.base.errors import (
    AlreadyExists,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    Overloaded,
    PeerLost,
    StaleGeneration,
)
from moonpool.transfer import (
    MemoryFabric,
    RemoteSegment,
    Segment,
    SegmentDescriptor,
    TransferConfig,
    TransferEngine,
    TransferOp,
    TransferRequest,
    TransferStatus,
)

NBYTES = 1 << 20
READ, WRITE = TransferOp.READ, TransferOp.WRITE


@pytest.fixture
def segment() -> Iterator[Segment]:
    with Segment.allocate("seg", NBYTES, granule_nbytes=4096, incarnation=1) as made:
        yield made


def config(tmp_path: Path, **settings: object) -> TransferConfig:
    return TransferConfig(run_dir=str(tmp_path), **settings)  # type: ignore[arg-type]


def only(descriptor: SegmentDescriptor, *schemes: str) -> SegmentDescriptor:
    kept = tuple(e for e in descriptor.endpoints if e.partition(":")[0] in schemes)
    return msgspec.structs.replace(descriptor, endpoints=kept)


class Gate(RemoteSegment):
    """A remote that waits until it is let go: for tests of queues and deadlines."""

    transport = "gate"

    def __init__(self) -> None:
        self.nbytes = NBYTES
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.offsets: list[int] = []

    def read_into(self, offset: int, buffers: object, *, timeout_s: float) -> None:
        self.entered.release()
        assert self.open.wait(HANG_S)
        self.offsets.append(offset)

    def write_from(self, offset: int, buffers: object, *, generation: int, timeout_s: float) -> None:
        raise ZeroDivisionError("a bug in a transport")

    def close(self) -> None:
        self.open.set()


def test_the_fastest_usable_endpoint_is_taken(tmp_path: Path, segment: Segment) -> None:
    fabric = MemoryFabric()
    with (
        TransferEngine(config(tmp_path), fabric=fabric) as owner,
        TransferEngine(config(tmp_path), fabric=fabric) as near,
        TransferEngine(config(tmp_path)) as beside,
        TransferEngine(config(tmp_path, shm=False, tcp_host=None)) as far,
    ):
        descriptor = owner.serve(segment)
        assert [e.partition(":")[0] for e in descriptor.endpoints] == ["memory", "shm", "tcp"]
        assert (descriptor.nbytes, descriptor.granule_nbytes) == (NBYTES, 4096)
        assert near.open(descriptor).transport == "memory"
        assert beside.open(descriptor).transport == "shm"
        assert far.open(descriptor).transport == "tcp"
        assert near.open(descriptor) is near.open(descriptor)
        elsewhere = msgspec.structs.replace(descriptor, host="another machine", incarnation=1)
        near.forget(descriptor)
        with TransferEngine(config(tmp_path)) as other:
            assert other.open(elsewhere).transport == "tcp"


def test_a_dead_endpoint_is_passed_over(tmp_path: Path, segment: Segment) -> None:
    with TransferEngine(config(tmp_path)) as owner, TransferEngine(config(tmp_path)) as peer:
        descriptor = owner.serve(segment)
        stale = tmp_path / "stale.sock"
        stale.touch()
        broken = msgspec.structs.replace(descriptor, endpoints=(f"shm:{stale}", descriptor.endpoints[1]))
        assert peer.open(broken).transport == "tcp"
        with pytest.raises(PeerLost):
            peer.open(msgspec.structs.replace(broken, name="other", endpoints=(f"shm:{stale}",)))
        with pytest.raises(NotFound, match="no endpoint"):
            peer.open(msgspec.structs.replace(broken, name="other", endpoints=("nvlink:7",)))


@pytest.mark.parametrize("way", ["memory", "shm", "tcp"])
def test_batches_move_every_byte(tmp_path: Path, segment: Segment, way: str) -> None:
    fabric = MemoryFabric()
    with (
        TransferEngine(config(tmp_path), fabric=fabric) as owner,
        TransferEngine(config(tmp_path, slice_nbytes=10_000), fabric=fabric) as peer,
    ):
        remote = peer.open(only(owner.serve(segment), way))
        assert remote.transport == way
        data = np.random.default_rng(1).integers(0, 256, NBYTES, dtype=np.uint8)
        half = NBYTES // 2
        writes = [
            TransferRequest(WRITE, remote, 0, [data[:77], data[77:half]], generation=1),
            TransferRequest(WRITE, remote, half, [data[half:]], generation=1),
            TransferRequest(WRITE, remote, NBYTES, [], generation=1),
        ]
        peer.submit(writes).wait(HANG_S)
        assert bytes(segment.memory) == data.tobytes()
        back = np.zeros_like(data)
        batch = peer.submit([TransferRequest(READ, remote, n * 4096, [back[n * 4096 :][:4096]]) for n in range(256)])
        batch.wait(HANG_S)
        assert (back == data).all()
        assert batch.done()
        assert {batch.status(n) for n in range(len(batch))} == {TransferStatus.DONE}


def test_one_bad_request_does_not_fail_its_neighbours(tmp_path: Path, segment: Segment) -> None:
    with TransferEngine(config(tmp_path)) as owner, TransferEngine(config(tmp_path, slice_nbytes=1000)) as peer:
        remote = peer.open(owner.serve(segment))
        remote.write_from(8192, [b"x"], generation=9, timeout_s=HANG_S)
        batch = peer.submit(
            [
                TransferRequest(WRITE, remote, 0, [b"good" * 1000], generation=1),
                TransferRequest(WRITE, remote, 8192, [b"late" * 1000], generation=1),
                TransferRequest(WRITE, remote, 16384, [b"fine" * 1000], generation=1),
            ]
        )
        with pytest.raises(StaleGeneration):
            batch.wait(HANG_S)
        assert [batch.status(n).value for n in range(3)] == ["done", "failed", "done"]
        assert [type(batch.error(n)) for n in range(3)] == [type(None), StaleGeneration, type(None)]
        assert bytes(segment.memory[16384:16388]) == b"fine"
        assert bytes(segment.memory[8192:8193]) == b"x"


def test_unusable_buffers_are_refused_at_submit(tmp_path: Path) -> None:
    with TransferEngine(config(tmp_path)) as engine:
        with pytest.raises(InvalidInput):
            engine.submit([TransferRequest(READ, Gate(), 0, [b"read-only"])])
        engine.submit([]).wait(0)


def test_a_bug_in_a_transport_fails_the_batch_and_not_the_engine(tmp_path: Path) -> None:
    with TransferEngine(config(tmp_path, num_threads=1)) as engine:
        for _ in range(3):
            with pytest.raises(Exception, match="ZeroDivisionError"):
                engine.submit([TransferRequest(WRITE, Gate(), 0, [b"x"])]).wait(HANG_S)


def test_waiting_has_a_limit_and_so_has_the_batch(tmp_path: Path) -> None:
    gate = Gate()
    with TransferEngine(config(tmp_path, num_threads=1)) as engine:
        first = engine.submit([TransferRequest(READ, gate, 0, [bytearray(1)])], room_timeout_s=0)
        late = engine.submit([TransferRequest(READ, gate, 1, [bytearray(1)])], timeout_s=0.01, room_timeout_s=0)
        with pytest.raises(DeadlineExceeded, match="not done after"):
            first.wait(0.05)
        assert first.status(0) is TransferStatus.PENDING
        gate.open.set()
        first.wait(HANG_S)
        with pytest.raises(DeadlineExceeded, match=r"within 0\.01 s"):
            late.wait(HANG_S)
        assert gate.offsets == [0]


def test_the_queue_is_bounded(tmp_path: Path) -> None:
    gate = Gate()
    with TransferEngine(config(tmp_path, num_threads=1, max_queued_slices=2, slice_nbytes=1)) as engine:
        running = engine.submit([TransferRequest(READ, gate, 0, [bytearray(1)])], room_timeout_s=0)
        assert gate.entered.acquire(timeout=HANG_S)
        waiting = engine.submit([TransferRequest(READ, gate, 0, [bytearray(2)])])
        with pytest.raises(Overloaded):
            engine.submit([TransferRequest(READ, gate, 0, [bytearray(2)])], timeout_s=0.05)
        gate.open.set()
        running.wait(HANG_S)
        waiting.wait(HANG_S)
        engine.submit([TransferRequest(READ, gate, 0, [bytearray(10)])]).wait(
            HANG_S
        )  # larger than the queue, yet taken


def test_close_ends_threads_sockets_and_waiters(tmp_path: Path, segment: Segment) -> None:
    gc.collect()  # what earlier tests left to the collector must not be counted now and be gone later
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    gate = Gate()
    owner, peer = TransferEngine(config(tmp_path)), TransferEngine(config(tmp_path, num_threads=1))
    descriptor = owner.serve(segment)
    remote = peer.open(only(descriptor, "tcp"))
    peer.open(msgspec.structs.replace(descriptor, endpoints=descriptor.endpoints[:1]))
    peer.submit([TransferRequest(READ, remote, 0, [bytearray(NBYTES)])]).wait(HANG_S)
    running = peer.submit([TransferRequest(READ, gate, 0, [bytearray(1)])], room_timeout_s=0)
    assert gate.entered.acquire(timeout=HANG_S)
    waiting = peer.submit([TransferRequest(READ, gate, 0, [bytearray(1)])], room_timeout_s=0)
    threading.Timer(0.05, gate.open.set).start()
    peer.close()
    peer.close()
    running.wait(HANG_S)
    with pytest.raises(PeerLost, match="closed"):
        waiting.wait(HANG_S)
    with pytest.raises(PeerLost):
        peer.submit([TransferRequest(READ, gate, 0, [bytearray(1)])])
    with pytest.raises(PeerLost):
        peer.open(descriptor)
    owner.close()
    owner.close()
    # A connection's thread that ended by itself was not joined; it may need a moment for its last step.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name.startswith(("tcp-", "Thread-")):
            thread.join(HANG_S)
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= fds
    assert not list(tmp_path.iterdir())


def test_names_and_settings_are_checked(tmp_path: Path, segment: Segment) -> None:
    with TransferEngine(config(tmp_path)) as engine, Segment.allocate("seg", 1, incarnation=2) as namesake:
        engine.serve(segment)
        with pytest.raises(AlreadyExists):
            engine.serve(namesake)
        engine.unserve("seg")
        engine.unserve("seg")
        engine.serve(segment)
    with pytest.raises(ConfigError):
        TransferEngine(config(tmp_path, lanes=0))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="longer than"):
        TransferEngine(config(tmp_path / ("x" * 100)))
    with pytest.raises(ConfigError, match="tcp_advertise_host"):
        TransferEngine(config(tmp_path, tcp_host="0.0.0.0"))
    assert len(os.listdir("/proc/self/fd")) <= before


def test_memory_without_a_descriptor_goes_by_tcp(tmp_path: Path) -> None:
    pages = np.zeros((4, 100), dtype=np.float32)
    with (
        Segment.over("pages", pages, incarnation=1) as segment,
        TransferEngine(config(tmp_path)) as owner,
        TransferEngine(config(tmp_path)) as peer,
    ):
        remote = peer.open(owner.serve(segment))
        assert remote.transport == "tcp"
        remote.write_from(400, [np.ones(100, dtype=np.float32)], generation=0, timeout_s=HANG_S)
        assert (pages[1] == 1).all()
        assert pages.sum() == 100
