"""`mooncake.engine` with memory taken for a GPU's: what is staged, what goes directly, and the calls on a stream.

A real GPU is in test_mooncake_engine_gpu.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from fake_gpu import FakeDevice
from mooncake_peer import EnginePeer

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake import engine_cuda, engine_memory, engine_session, transfer_engine
from moonpool.integrations.mooncake.transfer_engine import MooncakeTransferEngine
from moonpool.transfer.transports import mapped
from moonpool.transfer.transports.cuda import copy

KIB = 1024
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class FakeGpu:
    """Main memory of this process that the code under test takes for a GPU's."""

    def __init__(self) -> None:
        self.memory = np.random.default_rng(1).integers(0, 256, 512 * KIB, np.uint8)
        self.device = FakeDevice()
        self.waited_for: list[int] = []
        self.device.wait_stream = self.waited_for.append  # type: ignore[method-assign, assignment]

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def device_of(self, address: int) -> FakeDevice:
        if not self.address <= address < self.address + self.memory.nbytes:
            raise InvalidInput("main memory")
        return self.device


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu()
    driver = SimpleNamespace(
        device_of=made.device_of,
        device=lambda index: made.device,
        is_pinned=lambda address: False,
        registrations_between=lambda start, end: [],
    )
    for module in (engine_memory, engine_session, engine_cuda, transfer_engine, mapped, copy):
        monkeypatch.setattr(module, "driver", lambda: driver)
    monkeypatch.setattr(engine_cuda, "has_cuda", lambda: True)
    monkeypatch.setattr(engine_session, "_STAGED_NBYTES", 100 * KIB)
    return made


@pytest.fixture
def engine() -> Iterator[MooncakeTransferEngine]:
    made = MooncakeTransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    yield made
    made.close()


@pytest.fixture(params=["plain", "managed"])
def peer(request: pytest.FixtureRequest) -> Iterator[EnginePeer]:
    with tempfile.TemporaryDirectory(prefix="mp-peers-") as folder:
        made = EnginePeer(512 * KIB, kind=request.param, env={"TMPDIR": folder})
        yield made
        made.close()


def test_gpu_memory_is_staged_or_copied_directly(
    engine: MooncakeTransferEngine, gpu: FakeGpu, peer: EnginePeer
) -> None:
    before, at = gpu.memory.copy(), gpu.address
    sizes = [250 * KIB, 10, 60 * KIB, 30 * KIB]
    starts = [0, 260 * KIB, 270 * KIB, 400 * KIB]
    there = [peer.memory + start for start in starts]
    assert engine.batch_transfer_sync_write(peer.name, [at + start for start in starts], there, sizes) == 0
    main = np.zeros(512 * KIB, np.uint8)
    mine = [int(main.ctypes.data) + start for start in starts]
    assert engine.batch_transfer_sync_read(peer.name, mine, there, sizes) == 0
    gpu.memory[:] = 0
    assert engine.batch_transfer_sync_read(peer.name, [at + start for start in starts], there, sizes) == 0
    for start, size in zip(starts, sizes, strict=True):
        assert np.array_equal(main[start : start + size], before[start : start + size])
        assert np.array_equal(gpu.memory[start : start + size], before[start : start + size])
        assert not gpu.memory[start + size : start + size + 10].any()


def test_bytes_of_gpu_memory(engine: MooncakeTransferEngine, gpu: FakeGpu) -> None:
    assert engine.read_bytes_from_buffer(gpu.address + 5, 64) == gpu.memory[5:69].tobytes()
    assert engine.write_bytes_to_buffer(gpu.address, b"abcdef", 3) == 0
    assert gpu.memory[:3].tobytes() == b"abc"


def test_calls_on_a_stream_wait_for_it(engine: MooncakeTransferEngine, gpu: FakeGpu, peer: EnginePeer) -> None:
    before, at = gpu.memory.copy(), gpu.address
    engine.transfer_write_on_cuda(peer.name, at, peer.memory, 4 * KIB, 1007)
    engine.batch_transfer_write_on_cuda(peer.name, [at + 4 * KIB], [peer.memory + 4 * KIB], [KIB], stream_ptr=1008)
    gpu.memory[:] = 0
    engine.transfer_read_on_cuda(peer.name, at, peer.memory, 4 * KIB)
    engine.batch_transfer_read_on_cuda(peer.name, [at + 4 * KIB], [peer.memory + 4 * KIB], [KIB], 1009)
    assert np.array_equal(gpu.memory[: 5 * KIB], before[: 5 * KIB])
    callers = [stream for stream in gpu.waited_for if stream == 0 or stream > 1000]  # copies have streams of their own
    assert callers == [1007, 1008, 0, 1009]
    with pytest.raises(RuntimeError, match="not registered"):
        engine.transfer_read_on_cuda(peer.name, at, 4096, 16)
    with pytest.raises(RuntimeError, match="different sizes"):
        engine.batch_transfer_read_on_cuda(peer.name, [at], [], [16])
    engine.close()
    with pytest.raises(ValueError):
        engine.transfer_read_on_cuda(peer.name, at, peer.memory, 16)
