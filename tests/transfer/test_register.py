"""Any memory becomes a segment, stays alive as long as it, and is refused with a reason when it cannot be used."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import HANG_S

from moonpool.base.errors import ConfigError, InvalidInput
from moonpool.transfer.memory.buffers import RawMemory, as_bytes_view, device_span
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.register import make_segment
from moonpool.transfer.transports.file.segment import FileSegment


def check_shared(segment: Segment, memory: Any) -> None:
    segment.memory[0] = 77
    assert as_bytes_view(memory, writable=False)[0] == 77


@pytest.mark.parametrize(
    "memory",
    [
        bytearray(64),
        mmap.mmap(-1, 4096),
        np.zeros((4, 4), np.float32),
        np.zeros(9, np.float16),
        memoryview(bytearray(5)),
    ],
    ids=["bytearray", "mmap", "float32", "float16", "memoryview"],
)
def test_buffers(memory: Any) -> None:
    with make_segment("m", memory, incarnation=1) as segment:
        assert (segment.nbytes, segment.location) == (memoryview(memory).nbytes, "cpu")
        check_shared(segment, memory)


def test_what_cannot_be_used_is_refused() -> None:
    for memory, why in [
        (b"abc", "read-only"),
        (np.zeros((4, 4))[:, :2], "contiguous"),
        (7, "buffer protocol"),
        (bytearray(), "at least one byte"),
    ]:
        with pytest.raises(InvalidInput, match=why):
            make_segment("m", memory, incarnation=1)  # type: ignore[arg-type]
    frozen = np.zeros(8)
    frozen.flags.writeable = False
    with pytest.raises(InvalidInput, match="read-only"):
        make_segment("m", frozen, incarnation=1)
    with pytest.raises(InvalidInput, match="has 8 bytes, not 9"):
        make_segment("m", bytearray(8), nbytes=9, incarnation=1)


@pytest.mark.parametrize("location", ["cuda:0", "ssd:/tmp/x"])
def test_a_location_that_contradicts_the_memory_is_refused(location: str) -> None:
    with pytest.raises(InvalidInput, match=f"the memory given is main memory, not {location}"):
        make_segment("m", bytearray(8), location=location, incarnation=1)
    with pytest.raises(ConfigError, match="no memory location"):
        make_segment("m", bytearray(8), location="moon", incarnation=1)


def test_the_callers_word_counts_for_the_node() -> None:
    assert make_segment("m", bytearray(8), location="cpu:1", incarnation=1).location == "cpu:1"
    raw = RawMemory(ctypes.addressof(ctypes.create_string_buffer(8)), 8, "cpu:3")
    assert make_segment("m", raw, incarnation=1).location == "cpu:3"


def test_raw_memory_and_its_owner() -> None:
    owner = (ctypes.c_ubyte * 16)()
    alive = weakref.ref(owner)
    segment = make_segment("m", RawMemory(ctypes.addressof(owner), 16, owner=owner), granule_nbytes=4, incarnation=1)
    view = segment.memory[3:]
    segment.memory[3] = 9
    assert owner[3] == 9
    del owner
    segment.close()
    gc.collect()
    assert alive() is not None  # a view is still out
    assert view[0] == 9
    del view
    gc.collect()
    assert alive() is None
    for address, nbytes, location in [
        (0, 1, "cpu"),
        (-8, 1, "cpu"),
        (8, 0, "cpu"),
        (8, 1, "ssd:/x"),
        (8, 1, "nowhere"),
    ]:
        with pytest.raises(InvalidInput):
            RawMemory(address, nbytes, location)


class CpuDlpack:
    """An array that knows DLPack and nothing else, as other libraries' do."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class OnGpu:
    """Memory that says it lies on a GPU."""

    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = {
            "typestr": "<f4",
            "shape": (2, 3),
            "data": (4096, False),
            "version": 3,
            **interface,
        }


def test_arrays_of_other_libraries() -> None:
    array = np.arange(6, dtype=np.int16)
    assert as_bytes_view(CpuDlpack(array), writable=False) == array.tobytes()  # type: ignore[arg-type]


def test_memory_of_a_gpu_is_told_from_main_memory() -> None:
    span = device_span(OnGpu())
    assert span is not None
    assert (span.address, span.nbytes, span.readonly) == (4096, 24, False)
    assert (span[4:20].address, span[4:20].nbytes, span[4:20].owner) == (4100, 16, span.owner)
    packed = device_span(OnGpu(strides=(12, 4)))
    assert packed is not None
    assert packed.nbytes == 24
    with pytest.raises(InvalidInput, match="contiguous"):
        device_span(OnGpu(strides=(16, 4)))
    for memory in (OnGpu(), RawMemory(4096, 8, "cuda:1")):
        with pytest.raises(InvalidInput, match="lies on"):
            as_bytes_view(memory, writable=True)
    assert device_span(bytearray(4)) is None
    assert device_span(RawMemory(4096, 8)) is None


def test_memory_is_taken_where_it_is_wanted(tmp_path: Path) -> None:
    with make_segment("a", nbytes=8192, location="cpu:0", granule_nbytes=4096, incarnation=1) as segment:
        assert (segment.location, segment.fd is not None, segment.fence is not None) == ("cpu:0", True, True)
    with make_segment("a", nbytes=8192, incarnation=1) as segment:
        assert segment.location == "cpu"
    path = os.path.realpath(tmp_path / "kv")
    with make_segment("a", nbytes=8192, location=f"ssd:{path}", granule_nbytes=4096, incarnation=1) as segment:
        assert isinstance(segment, FileSegment)
        assert (segment.name, segment.location) == ("a", f"ssd:{path}")
        segment.write_from(0, [b"kept"], generation=1, timeout_s=HANG_S)
    with make_segment("b", location=f"ssd:{path}", incarnation=2) as segment:
        assert isinstance(segment, FileSegment)
        back = bytearray(4)
        segment.read_into(0, [back], timeout_s=HANG_S)
        assert (segment.nbytes, bytes(back)) == (8192, b"kept")
    with pytest.raises(InvalidInput, match="has 8192 bytes"):
        make_segment("b", nbytes=4096, location=f"ssd:{path}", incarnation=2)
    with pytest.raises(InvalidInput, match="no segment yet"):
        make_segment("b", location=f"ssd:{path}2", incarnation=2)
    with pytest.raises(InvalidInput, match="needs memory, or nbytes"):
        make_segment("b", location="cpu", incarnation=2)


class TestTorch:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64"])
    def test_tensors_of_every_type(self, dtype: str) -> None:
        torch = pytest.importorskip("torch")
        tensor = torch.zeros((3, 5), dtype=getattr(torch, dtype))
        with make_segment("t", tensor, incarnation=1) as segment:
            assert segment.nbytes == tensor.nbytes
            segment.memory[:] = bytes([1]) * segment.nbytes
        assert (tensor.view(torch.uint8) == 1).all()

    def test_the_segment_keeps_the_tensor(self) -> None:
        torch = pytest.importorskip("torch")
        tensor = torch.zeros(1000)
        alive = weakref.ref(tensor)
        segment = make_segment("t", tensor, incarnation=1)
        del tensor
        gc.collect()
        assert alive() is not None
        segment.close()
        gc.collect()
        assert alive() is None

    def test_tensors_that_cannot_be_used(self) -> None:
        torch = pytest.importorskip("torch")
        for tensor, why in [
            (torch.zeros(4, 4)[:, :2], "contiguous"),
            (torch.zeros(4, device="meta"), "no memory"),
            (torch.zeros(4, dtype=torch.complex64).conj(), "resolve_conj"),
            (torch.zeros(0), "at least one byte"),
            (torch.zeros(4).to_sparse(), "contiguous"),
        ]:
            with pytest.raises(InvalidInput, match=why):
                make_segment("t", tensor, incarnation=1)

    def test_tensors_as_the_callers_buffers(self) -> None:
        torch = pytest.importorskip("torch")
        part = torch.arange(10, dtype=torch.int32)[2:5]
        view = as_bytes_view(part, writable=True)
        assert np.frombuffer(view, np.int32).tolist() == [2, 3, 4]
        assert as_bytes_view(torch.nn.Parameter(torch.ones(2)), writable=False).nbytes == 8
        assert as_bytes_view(torch.zeros(0), writable=True).nbytes == 0
