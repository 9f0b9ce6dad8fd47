"""On a machine with an NVIDIA GPU, `pytest -m gpu`: real processes and CUDA IPC; and the whole conformance suite for an
owner and a peer in one process. Without torch the tests of its tensors are left out.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from waiting import HANG_S

from moonpool.base.checksum import crc32c
from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound, PeerLost, StaleGeneration, Unavailable
from moonpool.transfer import SegmentDescriptor, host_id
from moonpool.transfer.control import ControlHandler
from moonpool.transfer.memory.buffers import DeviceSpan, RawMemory
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.register import make_segment
from moonpool.transfer.transports.base import Transport
from moonpool.transfer.transports.cuda import ipc as cuda_ipc
from moonpool.transfer.transports.cuda.driver import driver
from moonpool.transfer.transports.cuda.segment import DeviceSegment
from moonpool.transfer.transports.cuda.transport import CudaRemote, CudaTransport
from moonpool.transfer.transports.tcp.transport import TcpTransport

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

SCRIPT = str(Path(__file__).with_name("cuda_owner.py"))
NBYTES = 8 << 20
T = 20.0


class Owner:
    def __init__(self, kind: str, nbytes: int, granule_nbytes: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, SCRIPT, kind, str(nbytes), str(granule_nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.descriptor = msgspec.json.decode(self._process.stdout.readline(), type=SegmentDescriptor)
        self.first = np.frombuffer(np.random.default_rng(1).bytes(nbytes), np.uint8)  # what it begins with

    def say(self, word: str) -> int:
        """The checksum of its memory afterwards."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self._process.communicate(timeout=HANG_S)


class Peer:
    """Owners of any kind, and handles of their segments."""

    def __init__(self) -> None:
        self._tcp = TcpTransport(None)
        self.transport = CudaTransport(ControlHandler(), None, self._tcp.line)
        self._owners: list[Owner] = []
        self._remotes: list[CudaRemote] = []

    def owner(self, kind: str = "plain", nbytes: int = NBYTES, granule_nbytes: int = 0) -> Owner:
        self._owners.append(Owner(kind, nbytes, granule_nbytes))
        return self._owners[-1]

    def open(self, owner: Owner) -> CudaRemote:
        descriptor = owner.descriptor
        assert self.transport.usable(descriptor, descriptor.endpoints[0])
        self._remotes.append(self.transport.open(descriptor, descriptor.endpoints[0], timeout_s=T))
        return self._remotes[-1]

    def close(self) -> None:
        for remote in self._remotes:
            remote.close()
        for owner in self._owners:
            owner.close()
        self.transport.close()
        self._tcp.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    gc.collect()  # what errors of earlier tests still hold
    made = Peer()
    yield made
    made.close()


def random_bytes(nbytes: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def torch_on_gpu() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch sees no GPU")
    return torch


@pytest.mark.parametrize("kind", ["plain", "torch"])
@pytest.mark.parametrize("granule_nbytes", [0, 65536])
def test_bytes_by_ipc_equal_the_owners(peer: Peer, kind: str, granule_nbytes: int) -> None:
    if kind == "torch":
        torch_on_gpu()
    owner = peer.owner(kind, granule_nbytes=granule_nbytes)
    remote = peer.open(owner)
    back = np.zeros(NBYTES, np.uint8)
    remote.read_into(0, [back[:1000], back[1000:]], timeout_s=T)
    assert (back == owner.first).all()
    data = random_bytes(NBYTES - 12345)
    remote.write_from(12345, [data[:7], data[7:]], generation=3, timeout_s=T)
    expected = owner.first.copy()
    expected[12345:] = data
    assert owner.say("sum") == crc32c(expected.data)


def test_many_small_ones(peer: Peer) -> None:
    owner = peer.owner(granule_nbytes=4096)
    remote = peer.open(owner)
    expected = owner.first.copy()
    offsets = list(range(0, NBYTES, 2 * 4096))
    for offset in offsets:
        expected[offset : offset + 4096] = random_bytes(4096, offset)
    remote.write_many([(o, expected[o : o + 4096]) for o in offsets], generation=1, timeout_s=T)
    assert owner.say("sum") == crc32c(expected.data)
    back = np.zeros(NBYTES, np.uint8)
    remote.read_many([(o, back[o : o + 4096]) for o in range(0, NBYTES, 4096)], timeout_s=T)
    assert (back == expected).all()


def test_to_and_from_pinned_and_gpu_memory(peer: Peer) -> None:
    owner = peer.owner()
    remote = peer.open(owner)
    device = driver().device(0)
    own = DeviceSegment.create("own", NBYTES, device=0, incarnation=1)
    _, pinned = device.pinned(NBYTES)
    assert driver().is_pinned(np.frombuffer(pinned, np.uint8).ctypes.data)
    assert not driver().is_pinned(np.zeros(NBYTES, np.uint8).ctypes.data)
    remote.read_into(100, [pinned[: NBYTES - 100]], timeout_s=T)
    assert pinned[: NBYTES - 100] == owner.first[100:].data
    remote.read_into(0, [own.span], timeout_s=T)
    back = np.zeros(NBYTES, np.uint8)
    own.read_into(0, [back], timeout_s=T)
    assert (back == owner.first).all()
    data = random_bytes(NBYTES)
    own.write_from(0, [data], generation=0, timeout_s=T)
    remote.write_from(4096, [own.span[4096 : NBYTES // 2], data[NBYTES // 2 :]], generation=0, timeout_s=T)
    expected = owner.first.copy()
    expected[4096:] = data[4096:]
    assert owner.say("sum") == crc32c(expected.data)
    pinned[:] = data.data
    remote.write_from(0, [pinned], generation=0, timeout_s=T)
    assert owner.say("sum") == crc32c(data.data)
    own.close()


def test_torch_tensors_of_the_peer(peer: Peer) -> None:
    torch = torch_on_gpu()
    owner = peer.owner("torch")
    remote = peer.open(owner)
    expected = torch.from_numpy(owner.first.copy())
    for target in (
        torch.zeros(NBYTES // 2, dtype=torch.bfloat16, device="cuda:0"),
        torch.zeros(NBYTES // 2, dtype=torch.bfloat16).pin_memory(),
        torch.zeros(NBYTES // 2, dtype=torch.bfloat16),
    ):
        torch.cuda.synchronize()
        remote.read_into(0, [target], timeout_s=T)
        assert torch.equal(target.view(torch.uint8).cpu(), expected)
        target.view(torch.uint8).add_(1)
        torch.cuda.synchronize()
        remote.write_from(0, [target], generation=0, timeout_s=T)
        expected = expected + 1
        assert owner.say("sum") == crc32c(expected.numpy())
    with pytest.raises(InvalidInput, match="contiguous"):
        remote.read_into(0, [torch.zeros(4, 4, device="cuda:0")[:, :2]], timeout_s=T)


def test_late_writers_are_kept_out(peer: Peer) -> None:
    owner = peer.owner(granule_nbytes=65536)
    remote = peer.open(owner)
    remote.write_from(0, [b"new"], generation=7, timeout_s=T)
    before = owner.say("sum")
    with pytest.raises(StaleGeneration):
        remote.write_from(10, [b"old"], generation=6, timeout_s=T)
    with pytest.raises(StaleGeneration):
        remote.write_many([(65536 * n, b"old") for n in range(3)], generation=6, timeout_s=T)
    assert owner.say("sum") == before
    remote.write_from(65536, [b"another granule"], generation=6, timeout_s=T)


def test_outside_the_segment_nothing_is_reached(peer: Peer) -> None:
    remote = peer.open(peer.owner("plain", 4096))
    for offset, nbytes in [(-1, 1), (0, 4097), (4096, 1), (2**63, 1)]:
        with pytest.raises(InvalidInput):
            remote.read_into(offset, [bytearray(nbytes)], timeout_s=T)
        with pytest.raises(InvalidInput):
            remote.write_many([(0, b"fine"), (offset, bytes(nbytes))], generation=0, timeout_s=T)
        with pytest.raises(InvalidInput):
            remote.read_into(offset, [DeviceSpan(4096, nbytes)], timeout_s=T)
    with pytest.raises(InvalidInput, match="not memory of a GPU"):
        remote.read_into(0, [RawMemory(4096, 16, "cuda:0")], timeout_s=T)


def num_mapped() -> int:
    return len(cuda_ipc._mapped)


def test_withdrawn_returned_and_replaced(peer: Peer) -> None:
    owner = peer.owner()
    remote = peer.open(owner)
    assert num_mapped() == 1
    owner.say("leave")
    with pytest.raises(NotFound):
        remote.read_into(0, [bytearray(1)], timeout_s=T)
    with pytest.raises(NotFound):
        remote.write_from(0, [b"x"], generation=0, timeout_s=T)
    gc.collect()
    assert num_mapped() == 0
    owner.say("return")
    back = np.zeros(NBYTES, np.uint8)
    remote.read_into(0, [back], timeout_s=T)
    assert (back == owner.first).all()
    owner.say("other")
    remote.read_into(0, [back], timeout_s=T)
    assert (back == 1).all()


def test_an_allocation_is_mapped_once(peer: Peer) -> None:
    owner = peer.owner()
    remotes = [peer.open(owner) for _ in range(3)]
    assert num_mapped() == 1
    for remote in remotes[:2]:
        remote.close()
    remotes[2].read_into(0, [bytearray(4)], timeout_s=T)
    remotes[2].close()
    with pytest.raises(PeerLost):
        remotes[2].read_into(0, [bytearray(4)], timeout_s=T)
    gc.collect()
    assert num_mapped() == 0


def test_memory_that_cannot_be_exported_says_why(peer: Peer) -> None:
    torch_on_gpu()
    owner = peer.owner("pool")
    with pytest.raises(Unavailable, match="expandable_segments"):
        peer.open(owner)


def moves(remote: CudaRemote, buffer: np.ndarray) -> list[Callable[[], None]]:
    small = [(at, buffer[at : at + 4096]) for at in range(0, NBYTES, 8192)]
    return [
        lambda: remote.read_into(0, [buffer], timeout_s=5 * HANG_S),
        lambda: remote.write_from(0, [buffer], generation=1, timeout_s=5 * HANG_S),
        lambda: remote.read_many(small, timeout_s=5 * HANG_S),
        lambda: remote.write_many(small, generation=1, timeout_s=5 * HANG_S),
    ]


def test_owners_killed_in_the_middle(peer: Peer) -> None:
    """Callers learn it at once, and the dead owner's memory goes back to the GPU."""
    free: list[int] = []
    for _ in range(3):
        owner = peer.owner(granule_nbytes=65536)
        remote = peer.open(owner)
        ended: list[tuple[type[MoonpoolError], float]] = []
        moving = threading.Semaphore(0)

        def repeat(move: Callable[[], None], moving: threading.Semaphore = moving, ended: Any = ended) -> None:
            try:
                while True:
                    move()
                    moving.release()
            except MoonpoolError as error:
                ended.append((type(error), time.monotonic()))

        work = moves(remote, np.zeros(NBYTES, np.uint8))
        callers = [threading.Thread(target=repeat, args=(move,)) for move in work]
        for caller in callers:
            caller.start()
        assert moving.acquire(timeout=HANG_S)
        owner.kill()
        killed_at = time.monotonic()
        for caller in callers:
            caller.join(HANG_S)
        assert [kind for kind, _ in ended] == [PeerLost] * len(work)
        assert max(at for _, at in ended) - killed_at < HANG_S / 2
        gc.collect()
        assert num_mapped() == 0
        owner.close()
        free.append(driver().device(0).free_nbytes())
    assert free[0] - free[-1] < NBYTES


def test_the_owners_own_reads_and_writes() -> None:
    segment = make_segment("m", nbytes=NBYTES, location="cuda:0", granule_nbytes=4096, incarnation=1)
    assert isinstance(segment, DeviceSegment)
    assert segment.location == "cuda:0"
    data, back = random_bytes(NBYTES), np.zeros(NBYTES, np.uint8)
    segment.read_into(0, [back], timeout_s=T)
    assert not back.any()
    segment.write_from(0, [data], generation=2, timeout_s=T)
    segment.read_into(0, [back], timeout_s=T)
    assert (back == data).all()
    with pytest.raises(StaleGeneration):
        segment.write_from(0, [b"x"], generation=1, timeout_s=T)
    with pytest.raises(InvalidInput):
        segment.read_into(NBYTES, [bytearray(1)], timeout_s=T)
    with pytest.raises(InvalidInput, match="cannot be shown"):
        _ = segment.memory
    segment.close()
    with pytest.raises(Unavailable, match="closed"):
        segment.read_into(0, [back], timeout_s=T)
    with pytest.raises(InvalidInput, match="no cuda:77"):
        make_segment("m", nbytes=1, location="cuda:77", incarnation=1)


def test_tensors_become_segments_and_stay_alive() -> None:
    torch = torch_on_gpu()
    tensor = torch.zeros(1000, dtype=torch.bfloat16, device="cuda:0")
    with make_segment("t", tensor[10:20], incarnation=1) as segment:
        assert isinstance(segment, DeviceSegment)
        assert (segment.nbytes, segment.location) == (20, "cuda:0")
        segment.write_from(0, [b"\1" * 20], generation=0, timeout_s=T)
        assert tensor.view(torch.uint8).sum().item() == 20
    with pytest.raises(InvalidInput, match="the memory given is cuda:0, not cuda:1"):
        make_segment("t", tensor, location="cuda:1", incarnation=1)
    with pytest.raises(InvalidInput, match="the memory given is cuda:0, not cpu"):
        make_segment("t", tensor, location="cpu", incarnation=1)


def test_other_machines_reach_it_by_tcp() -> None:
    segment = make_segment("m", nbytes=NBYTES, location="cuda:0", granule_nbytes=65536, incarnation=1)
    assert isinstance(segment, DeviceSegment)
    tcp = TcpTransport()
    endpoint = tcp.serve(segment)
    descriptor = SegmentDescriptor(name="m", nbytes=NBYTES, incarnation=1, host="far", endpoints=(endpoint,))
    remote = tcp.open(descriptor, endpoint, timeout_s=T)
    data, back = random_bytes(NBYTES), np.zeros(NBYTES, np.uint8)
    remote.write_from(0, [data], generation=1, timeout_s=T)
    segment.read_into(0, [back], timeout_s=T)
    assert (back == data).all()
    back[:] = 0
    remote.read_into(0, [back], timeout_s=T)
    assert (back == data).all()
    tcp.close()
    segment.close()


def test_parallel_callers_by_ipc_do_not_mix(peer: Peer) -> None:
    remote = peer.open(peer.owner(nbytes=32 << 20, granule_nbytes=65536))

    def work(lane: int) -> bool:
        ok = True
        for turn in range(5):
            data, back = random_bytes(2 << 20, lane * 100 + turn), np.zeros(2 << 20, np.uint8)
            remote.write_from(lane * data.size, [data], generation=turn + 1, timeout_s=T)
            remote.read_into(lane * data.size, [back], timeout_s=T)
            ok = ok and bool((back == data).all())
        return ok

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))


# The conformance suite, with owner and peer in this process.


def _suite() -> Any:
    path = Path(__file__).parents[1] / "conformance" / "test_transports.py"
    sys.path.append(str(path.parent))  # it imports its neighbours
    spec = importlib.util.spec_from_file_location("transports_suite", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SUITE = _suite()
OWN_WORDS = {"test_views_show_the_owners_memory_and_cannot_write"}  # GPU memory cannot be viewed
for _name, _test in vars(SUITE).items():
    if _name.startswith("test_") and _name not in OWN_WORDS and "world" in inspect.signature(_test).parameters:
        globals()[f"test_suite_{_name[5:]}"] = _test


class WithDesk(CudaTransport):
    """A transport with a control of its own, which it closes."""

    def __init__(self) -> None:
        control = ControlHandler()
        self._tcp = TcpTransport(control=control)
        endpoint = self._tcp.serve(Segment.over("probe", bytearray(1), incarnation=1))
        self._tcp.unserve("probe")
        super().__init__(control, endpoint, self._tcp.line)

    def close(self) -> None:
        self._tcp.close()
        super().close()


class CudaWorld(SUITE.World):  # type: ignore[misc, name-defined]
    def __init__(self, make: Callable[[], Transport]) -> None:
        super().__init__(make)

    def segment(
        self, name: str = "seg", nbytes: int = SUITE.NBYTES, *, granule_nbytes: int | None = None, incarnation: int = 1
    ) -> Segment:
        made = DeviceSegment.create(name, nbytes, device=0, granule_nbytes=granule_nbytes, incarnation=incarnation)
        self._closables.append(made)
        return made

    @staticmethod
    def contents(segment: Segment, nbytes: int | None = None) -> bytes:
        assert isinstance(segment, DeviceSegment)
        found = bytearray(segment.nbytes if nbytes is None else nbytes)
        segment.read_into(0, [found], timeout_s=T)
        return bytes(found)


@pytest.fixture
def world() -> Iterator[CudaWorld]:
    made = CudaWorld(WithDesk)
    try:
        yield made
    finally:
        made.close()


def test_views_are_not_had(world: CudaWorld) -> None:
    remote = world.open(world.segment())
    assert remote.view(10, 20) is None
    assert remote.transport == "cuda"
    assert world.peer.usable(*world.serve(world.segment("other")))
    descriptor = SegmentDescriptor(name="x", nbytes=1, incarnation=1, host="elsewhere", endpoints=())
    assert not world.peer.usable(descriptor, "cuda:unix:/x")
    assert host_id() != "elsewhere"
