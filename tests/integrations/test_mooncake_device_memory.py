"""Mooncake's calls by pointer with memory taken for a GPU's: it is staged through main memory."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from fake_gpu import FakeDevice
from store_pool import LocalPool

from moonpool.base.errors import DeadlineExceeded, InvalidInput
from moonpool.integrations.mooncake import MooncakeDistributedStore, device_memory, engine_memory
from moonpool.integrations.mooncake.device_memory import RegisteredDeviceMemory
from moonpool.transfer.transports.cuda import copy

KIB = 1024
INVALID, NOT_FOUND, CHECKSUM = -600, -704, -801


class FakeGpu:
    """Main memory of this process that the code under test takes for a GPU's."""

    def __init__(self) -> None:
        self.memory = np.random.default_rng(1).integers(0, 256, 512 * KIB, np.uint8)
        self.device = FakeDevice()

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def device_of(self, address: int) -> FakeDevice:
        if not self.address <= address < self.address + self.memory.nbytes:
            raise InvalidInput("main memory")
        return self.device

    def bytes_at(self, offset: int, nbytes: int) -> bytes:
        return self.memory[offset : offset + nbytes].tobytes()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu()
    driver = SimpleNamespace(
        device_of=made.device_of, is_pinned=lambda address: False, registrations_between=lambda start, end: []
    )
    for module in (engine_memory, device_memory, copy):
        monkeypatch.setattr(module, "driver", lambda: driver)
    return made


@pytest.fixture
def registered(store: MooncakeDistributedStore, gpu: FakeGpu) -> MooncakeDistributedStore:
    assert store.register_buffer(gpu.address, gpu.memory.nbytes) == 0
    return store


def test_values_go_from_a_gpu_to_the_pool_and_back(registered: MooncakeDistributedStore, gpu: FakeGpu) -> None:
    value = gpu.bytes_at(0, 10 * KIB) + gpu.bytes_at(100 * KIB, 6 * KIB)
    pointers, sizes = [gpu.address, gpu.address + 100 * KIB], [10 * KIB, 6 * KIB]
    assert registered.batch_put_from_multi_buffers(["k"], [pointers], [sizes]) == [0]
    assert registered.get("k") == value
    targets = [gpu.address + 200 * KIB, gpu.address + 300 * KIB]
    assert registered.batch_get_into_multi_buffers(["k"], [targets], [[4 * KIB, 12 * KIB]]) == [16 * KIB]
    assert gpu.bytes_at(200 * KIB, 4 * KIB) + gpu.bytes_at(300 * KIB, 12 * KIB) == value


def test_single_buffers(registered: MooncakeDistributedStore, gpu: FakeGpu) -> None:
    assert registered.put_from("one", gpu.address, KIB) == 0
    assert registered.batch_put_from(["two"], [gpu.address + KIB], [KIB]) == [0]
    assert registered.upsert_from("one", gpu.address + KIB, KIB) == 0
    assert registered.get("one") == registered.get("two") == gpu.bytes_at(KIB, KIB)
    assert registered.get_into("two", gpu.address + 50 * KIB, KIB) == KIB
    assert gpu.bytes_at(50 * KIB, KIB) == gpu.bytes_at(KIB, KIB)


def test_main_memory_and_gpu_memory_in_one_value(registered: MooncakeDistributedStore, gpu: FakeGpu) -> None:
    main = np.arange(KIB, dtype=np.uint8)
    assert registered.register_buffer(int(main.ctypes.data), KIB) == 0
    pointers = [int(main.ctypes.data), gpu.address]
    assert registered.batch_put_from_multi_buffers(["k"], [pointers], [[KIB, KIB]]) == [0]
    assert registered.get("k") == main.tobytes() + gpu.bytes_at(0, KIB)


def test_a_key_that_fails_leaves_the_others_and_its_own_gpu_memory_alone(
    registered: MooncakeDistributedStore, gpu: FakeGpu
) -> None:
    assert registered.put_from("k", gpu.address, KIB) == 0
    before = gpu.bytes_at(10 * KIB, KIB)
    at = [gpu.address + offset * KIB for offset in (10, 20, 30, 600)]
    results = registered.batch_get_into_multi_buffers(
        ["none", "k", "k", "k"], [[at[0]], [at[1]], [at[2], at[2]], [at[3]]], [[KIB], [KIB], [KIB], [KIB]]
    )
    assert results == [NOT_FOUND, KIB, INVALID, INVALID]
    assert gpu.bytes_at(10 * KIB, KIB) == before
    assert gpu.bytes_at(20 * KIB, KIB) == gpu.bytes_at(0, KIB)


def test_calls_on_ranges_refuse_gpu_memory(registered: MooncakeDistributedStore, gpu: FakeGpu) -> None:
    assert registered.put("k", bytes(KIB)) == 0
    ((results,),) = registered.get_into_ranges([gpu.address], [["k"]], [[[0]]], [[[0]]], [[[KIB]]])
    assert results == [INVALID]


def test_memory_that_was_unregistered_is_not_touched(registered: MooncakeDistributedStore, gpu: FakeGpu) -> None:
    assert registered.unregister_buffer(gpu.address) == 0
    assert registered.unregister_buffer(gpu.address) == INVALID
    assert registered.batch_put_from(["k"], [gpu.address], [KIB]) == [INVALID]


def test_a_gpu_that_does_not_copy_is_an_error(
    registered: MooncakeDistributedStore, gpu: FakeGpu, pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert registered.put_from("stored", gpu.address, KIB) == 0

    def fail(*arguments: object) -> None:
        raise DeadlineExceeded("too late")

    monkeypatch.setattr(copy.Mover, "read", fail)
    monkeypatch.setattr(copy.Mover, "write", fail)
    assert registered.put_from("k", gpu.address, KIB) < 0
    assert registered.is_exist("k") == 0
    assert registered.get_into("stored", gpu.address, KIB) < 0


def test_ranges_do_not_overlap_and_are_of_one_gpu(gpu: FakeGpu) -> None:
    memory = RegisteredDeviceMemory()
    assert not memory.register(int(np.zeros(1).ctypes.data), 8)
    assert memory.register(gpu.address, KIB)
    with pytest.raises(InvalidInput):
        memory.register(gpu.address + KIB - 1, KIB)
    with pytest.raises(InvalidInput):
        memory.register(gpu.address + KIB, gpu.memory.nbytes)
    assert memory.holds(gpu.address, KIB)
    assert not memory.holds(gpu.address, KIB + 1)
    assert not memory.holds(gpu.address, -1)
