"""Tensors through Mooncake's API on a real pool: whole ones, parts by rank, requests, pointers, files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonpool.integrations.mooncake import MooncakeDistributedStore, ReplicateConfig
from moonpool.integrations.mooncake.parallel_layout import ParallelAxis, ReadTarget, TensorParallelism
from moonpool.integrations.mooncake.tensor_format import ELEMENT_TYPES, HEADER_NBYTES
from moonpool.integrations.mooncake.tensor_memory import serialize_tensor

torch = pytest.importorskip("torch")

MakeStore = Callable[..., MooncakeDistributedStore]
INVALID, NOT_FOUND, NO_FILE = -600, -704, -1100


class Arena:
    """Registered memory."""

    def __init__(self, store: MooncakeDistributedStore, nbytes: int = 256 * 1024) -> None:
        self.bytes = np.zeros(nbytes, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.nbytes = nbytes
        assert store.register_buffer(self.address, nbytes) == 0

    def write(self, tensor: Any, at: int = 0) -> tuple[int, int]:
        """Write a tensor object. Return its address and size."""
        header, _, nbytes, owner = serialize_tensor(tensor)
        value = header + owner.reshape(-1).view(torch.uint8).numpy().tobytes() if nbytes else header
        self.bytes[at : at + len(value)] = np.frombuffer(value, np.uint8)
        return self.address + at, len(value)


@pytest.fixture
def arena(store: MooncakeDistributedStore) -> Arena:
    return Arena(store)


def numbers(*shape: int, dtype: Any = torch.float32) -> Any:
    count = int(np.prod(shape))
    return torch.arange(count, dtype=torch.float32).to(dtype).reshape(shape)


def same(first: Any, second: Any) -> bool:
    if first is None or first.dtype != second.dtype or first.shape != second.shape:
        return False
    return bool(torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (first, second))))


def tp(rank: int, size: int, dim: int, *more: ParallelAxis) -> TensorParallelism:
    return TensorParallelism([*more, ParallelAxis("tp", rank, size, dim)])


# whole tensors


@pytest.mark.parametrize("name", [name for name, _ in ELEMENT_TYPES])
def test_every_element_type_comes_back(store: MooncakeDistributedStore, name: str) -> None:
    tensor = numbers(3, 4).to(getattr(torch, name))
    assert store.put_tensor("k", tensor) == 0
    assert same(store.get_tensor("k"), tensor)
    assert store.get_size("k") == HEADER_NBYTES + tensor.nbytes


def test_tensors_of_any_form_come_back(store: MooncakeDistributedStore) -> None:
    whole = numbers(4, 6)
    tensors = [torch.tensor(7.0), torch.empty(0), torch.empty(2, 0, 3), whole.T, whole[:, ::2], numbers(*[2] * 8)]
    tensors.append(torch.nn.Parameter(numbers(2)))
    keys = [str(number) for number in range(len(tensors))]
    assert store.batch_put_tensor(keys, tensors) == [0] * len(keys)
    for tensor, found in zip(tensors, store.batch_get_tensor(keys), strict=True):
        assert same(found, tensor.detach())


def test_a_tensor_that_was_read_is_the_callers_own(store: MooncakeDistributedStore) -> None:
    store.put_tensor("k", numbers(4))
    store.get_tensor("k").zero_()  # type: ignore[union-attr]
    assert same(store.get_tensor("k"), numbers(4))


def test_what_is_no_tensor_is_refused(store: MooncakeDistributedStore) -> None:
    wrong = [None, 3, np.zeros(3), "Tensor", torch.zeros(2, dtype=torch.complex64), torch.zeros([1] * 9)]
    for value in wrong:
        assert store.put_tensor("k", value) == INVALID
        assert store.upsert_tensor("k", value) == INVALID
        assert store.put_tensor_with_tp("k", value, tp_size=2) == INVALID
        assert store.put_tensor_with_parallelism("k", value) == INVALID
    assert store.batch_put_tensor(["a", "b"], [numbers(2), None]) == [0, INVALID]
    assert store.batch_put_tensor(["a"], []) == [INVALID]
    store.put("bytes", b"x" * 400)
    assert store.get_tensor("bytes") is None
    assert store.get_tensor("missing") is None
    assert store.get_tensor_with_parallelism("bytes") is None


def test_put_keeps_and_upsert_replaces(store: MooncakeDistributedStore) -> None:
    assert store.put_tensor("k", numbers(2)) == 0
    assert store.put_tensor("k", numbers(3)) == 0
    assert same(store.get_tensor("k"), numbers(2))
    assert store.upsert_tensor("k", numbers(3)) == 0
    assert same(store.get_tensor("k"), numbers(3))
    assert store.batch_upsert_tensor(["k", "l"], [numbers(4), numbers(5)]) == [0, 0]
    assert same(store.get_tensor("k"), numbers(4))
    assert store.upsert_pub_tensor("k", numbers(6), ReplicateConfig()) == 0
    assert store.batch_upsert_pub_tensor(["k"], [numbers(7)], ReplicateConfig()) == [0]
    assert same(store.get_tensor("k"), numbers(7))


def test_options_are_checked(store: MooncakeDistributedStore) -> None:
    config = ReplicateConfig(preferred_segments=["a", "b"])
    assert store.pub_tensor("k", numbers(2), config) == INVALID
    assert store.batch_pub_tensor(["k"], [numbers(2)], config) == [INVALID]
    assert store.pub_tensor_with_tp("k", numbers(2), config, tp_size=2) == INVALID
    assert store.batch_pub_tensor_with_tp(["k"], [numbers(2)], config, tp_size=2) == [INVALID]
    assert store.put_tensor_with_parallelism("k", numbers(2), tp(0, 2, 0), config) == INVALID
    assert store.pub_tensor("k", numbers(2), ReplicateConfig(with_hard_pin=True)) == 0
    assert store.batch_pub_tensor(["l"], [numbers(2)], ReplicateConfig(group_ids=["g"])) == [0]
    assert store.batch_pub_tensor(["m"], [numbers(2)], ReplicateConfig(group_ids=["g", "h"])) == [INVALID]


def test_calls_without_setup_are_refused() -> None:
    store = MooncakeDistributedStore()
    assert store.put_tensor("k", numbers(2)) == INVALID
    assert store.batch_upsert_tensor(["k"], [numbers(2)]) == [INVALID]
    assert store.get_tensor("k") is None
    assert store.batch_get_tensor(["k", "l"]) == [None, None]
    assert store.get_tensor_into("k", 4096, 10) is None
    assert store.batch_get_tensor_into(["k"], [4096], [10]) == [INVALID]
    assert store.batch_get_tensor_with_tp_into(["k"], [4096], [10], tp_size=2) == [None]
    assert store.put_tensor_from("k", 4096, 400) == INVALID
    assert store.put_tensor_with_parallelism("k", numbers(2), tp(0, 2, 0)) == INVALID
    assert store.save_tensor_to_safetensor("k") == INVALID
    assert store.load_tensor_from_safetensor("k", "file") is None
    assert store.get_tensor_into_cuda("k", numbers(2)) == INVALID


# the caller's memory


def test_objects_go_through_registered_memory(store: MooncakeDistributedStore, arena: Arena) -> None:
    tensor = numbers(5, 3, dtype=torch.bfloat16)
    pointer, size = arena.write(tensor)
    assert store.put_tensor_from("k", pointer, size) == 0
    assert same(store.get_tensor("k"), tensor)
    target = arena.address + 1024
    found = store.get_tensor_into("k", target, 1000)
    assert same(found, tensor)
    assert found.data_ptr() == target + HEADER_NBYTES  # type: ignore[union-attr]
    assert store.upsert_tensor_from("k", *arena.write(numbers(2), 4096)) == 0
    assert same(store.get_tensor("k"), numbers(2))
    assert store.batch_upsert_tensor_from(["k", "l"], *zip(*[arena.write(numbers(3), 4096)] * 2, strict=True)) == [0, 0]
    first, second, missing = store.batch_get_tensor_into(["k", "l", "m"], [target, target + 8192, target], [900] * 3)
    assert same(first, numbers(3))
    assert same(second, numbers(3))
    assert missing is None


def test_wrong_memory_is_refused(store: MooncakeDistributedStore, arena: Arena) -> None:
    store.put_tensor("k", numbers(100))
    assert store.get_tensor_into("k", arena.address, 500) is None
    assert store.get_tensor_into("k", 0, 5000) is None
    assert store.get_tensor_into("k", arena.address - 4096, 5000) is None
    assert store.batch_get_tensor_into(["k"], [0], [5000]) == [INVALID]
    assert store.batch_get_tensor_into(["k"], [arena.address], []) == [INVALID]
    pointer, size = arena.write(numbers(100))
    for wrong in ((0, size), (pointer, 0), (pointer, 100), (pointer, size - 1), (pointer + 8, size), (12345, size)):
        assert store.put_tensor_from("l", *wrong) == INVALID
        assert store.upsert_tensor_from("l", *wrong) == INVALID
        assert store.put_tensor_with_tp_from("l", *wrong, tp_size=2) == INVALID
        assert store.put_tensor_with_parallelism_from("l", *wrong, tp(0, 2, 0)) == INVALID
    assert store.batch_put_tensor_from(["l", "m"], [pointer, pointer + 8], [size, size]) == [INVALID, INVALID]
    assert store.batch_put_tensor_from([], [], []) == []
    assert store.is_exist("l") == 0


def test_a_target_on_no_gpu_is_refused(store: MooncakeDistributedStore) -> None:
    store.put_tensor("k", numbers(4))
    assert store.get_tensor_into_cuda("k", torch.empty(4)) == INVALID
    assert store.batch_get_tensor_into_cuda(["k"], []) == [INVALID]


@pytest.mark.gpu
def test_tensors_go_to_a_gpu_and_back(store: MooncakeDistributedStore) -> None:
    tensor = numbers(8, 8, dtype=torch.bfloat16).cuda()
    assert store.put_tensor("k", tensor) == 0
    assert same(store.get_tensor("k"), tensor.cpu())
    target = torch.zeros_like(tensor)
    assert store.get_tensor_into_cuda("k", target) == tensor.nbytes
    assert torch.equal(target, tensor)
    assert store.get_tensor_into_cuda("k", target.T) == INVALID
    assert store.get_tensor_into_cuda("k", target.float()) == INVALID
    assert store.get_tensor_into_cuda("missing", target) == INVALID
    assert store.put_tensor_with_tp("t", tensor, tp_size=2, split_dim=1) == 0
    assert same(store.get_tensor_with_tp("t", 1, 2), tensor[:, 4:].cpu().contiguous())


# parts by rank


@pytest.mark.parametrize(("shape", "dim", "size"), [((8, 6), 0, 4), ((8, 6), 1, 3), ((2, 4, 3), 1, 2), ((2, 0), 0, 2)])
def test_all_parts_are_stored_and_join_to_the_whole(
    store: MooncakeDistributedStore, arena: Arena, shape: tuple[int, ...], dim: int, size: int
) -> None:
    tensor = numbers(*shape)
    assert store.put_tensor_with_tp("k", tensor, tp_size=size, split_dim=dim) == 0
    assert store.put_tensor_with_tp_from("l", *arena.write(tensor), tp_size=size, split_dim=dim) == 0
    for key in "kl":
        parts = [store.get_tensor_with_tp(key, rank, size, dim) for rank in range(size)]
        assert torch.equal(torch.cat(parts, dim), tensor)
        into = store.get_tensor_with_tp_into(key, arena.address, arena.nbytes, size - 1, size, dim)
        assert same(into, tensor.chunk(size, dim)[-1].contiguous())
        assert torch.equal(store.get_tensor_with_parallelism(key, ReadTarget("full", tp(0, size, dim))), tensor)


def test_parts_in_batches(store: MooncakeDistributedStore, arena: Arena) -> None:
    tensors = [numbers(4, 2), numbers(3, 2), numbers(8)]
    assert store.batch_put_tensor_with_tp(["a", "b", "c"], tensors, tp_size=2) == [0, INVALID, 0]
    config = ReplicateConfig(group_ids=["x", "y"])
    assert store.batch_pub_tensor_with_tp(["d", "e"], [numbers(4)] * 2, config, tp_size=2) == [0, 0]
    assert store.batch_pub_tensor_with_tp(["f"], [numbers(4)], config, tp_size=2) == [INVALID]
    found = store.batch_get_tensor_with_tp(["a", "b", "c"], 1, 2)
    assert same(found[0], numbers(4, 2)[2:])
    assert found[1] is None
    into = store.batch_get_tensor_with_tp_into(["a", "c"], [arena.address, arena.address + 4096], [600, 600], 0, 2)
    assert same(into[1], numbers(8)[:4])
    pointers = [arena.write(numbers(4)), arena.write(numbers(3), 4096)]
    addresses, sizes = zip(*pointers, strict=True)
    assert store.batch_put_tensor_with_tp_from(["g", "h"], addresses, sizes, tp_size=2) == [0, INVALID]
    assert store.batch_put_tensor_with_tp_from(["g"], addresses, sizes, tp_size=2) == [INVALID]


def test_a_size_of_one_is_the_whole_tensor(store: MooncakeDistributedStore, arena: Arena) -> None:
    assert store.put_tensor_with_tp("k", numbers(3)) == 0
    assert same(store.get_tensor_with_tp("k"), numbers(3))
    assert same(store.get_tensor_with_parallelism("k", ReadTarget("shard", tp(0, 1, 0))), numbers(3))
    assert store.put_tensor_with_tp_from("l", *arena.write(numbers(3))) == 0
    assert store.batch_pub_tensor_with_tp(["m"], [numbers(3)]) == [0]
    assert [same(each, numbers(3)) for each in store.batch_get_tensor_with_tp(["l", "m"])] == [True, True]


# requests


@pytest.mark.parametrize("written", [1, 2, 4])
@pytest.mark.parametrize("read", [1, 2, 8])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_are_read_in_other_sizes(
    store: MooncakeDistributedStore, arena: Arena, written: int, read: int, dim: int
) -> None:
    tensor = numbers(8, 8, 8)
    for rank, part in enumerate(tensor.chunk(written, dim)):
        assert store.put_tensor_with_parallelism("k", part, tp(rank, written, dim)) == 0
    for rank, part in enumerate(tensor.chunk(read, dim)):
        target = ReadTarget("shard", tp(rank, read, dim))
        assert same(store.get_tensor_with_parallelism("k", target), part.contiguous())
        assert same(store.get_tensor_with_parallelism_into("k", arena.address, 9000, target), part.contiguous())
    target = ReadTarget("FULL", tp(0, read, dim))
    assert same(store.get_tensor_with_parallelism("k", target), tensor)
    assert same(store.get_tensor_with_parallelism_into("k", arena.address, 9000, target), tensor)


def test_more_axes_tell_tensors_apart(store: MooncakeDistributedStore, arena: Arena) -> None:
    stages = [ParallelAxis("pp", 0, 2, stage_id=7), ParallelAxis("pp", 1, 2, stage_id=9)]
    whole = [numbers(4, 4), numbers(4, 4) + 100]
    for stage, tensor in zip(stages, whole, strict=True):
        for rank in range(2):
            assert store.put_tensor_with_parallelism("k", tensor, tp(rank, 2, 1, stage)) == 0
    for stage, tensor in zip(stages, whole, strict=True):
        part = store.get_tensor_with_parallelism("k", ReadTarget("shard", tp(1, 2, 1, stage)))
        assert same(part, tensor[:, 2:].contiguous())
        turned = TensorParallelism(tp(0, 4, 1, stage).axes[::-1])
        assert same(store.get_tensor_with_parallelism("k", ReadTarget("full", turned)), tensor)
    expert = TensorParallelism([ParallelAxis("ep", 0, 4, expert_id=3)])
    assert store.put_tensor_with_parallelism("e", numbers(3), expert) == 0
    assert store.is_exist("e__ep_0of4_eid3") == 1
    assert same(store.get_tensor_with_parallelism("e", ReadTarget("shard", expert)), numbers(3))
    assert store.get_tensor_with_parallelism("e", ReadTarget("full", expert)) is None
    other = TensorParallelism([ParallelAxis("ep", 0, 4, expert_id=4)])
    assert store.get_tensor_with_parallelism("e", ReadTarget("shard", other)) is None
    data = ParallelAxis("dp", 1, 2)
    assert store.put_tensor_with_parallelism_from("f", *arena.write(whole[0]), tp(0, 2, 0, data)) == 0
    assert same(store.get_tensor_with_parallelism("f", ReadTarget("full", tp(1, 2, 0, data))), whole[0])


@pytest.mark.parametrize("from_memory", [False, True])
def test_several_writers_store_one_tensor(store: MooncakeDistributedStore, arena: Arena, from_memory: bool) -> None:
    tensor = numbers(6, 4)
    pointer, size = arena.write(tensor)
    for rank in range(3):
        partition = SimpleNamespace(rank=rank, size=3, split_dim=0)
        if from_memory:
            assert store.put_tensor_with_parallelism_from("k", pointer, size, writer_partition=partition) == 0
        else:
            assert store.put_tensor_with_parallelism("k", tensor, writer_partition=partition) == 0
    assert same(store.get_tensor_with_parallelism("k", ReadTarget("full")), tensor)
    assert same(store.get_tensor_with_parallelism("k", ReadTarget("shard", tp(1, 3, 0))), tensor[2:4])
    into = store.get_tensor_with_parallelism_into("k", arena.address + 8192, 4000, ReadTarget("full"))
    assert same(into, tensor)


def test_a_missing_part_is_a_miss(store: MooncakeDistributedStore) -> None:
    tensor = numbers(8)
    for rank in (0, 1, 3):
        assert store.put_tensor_with_parallelism("k", tensor.chunk(4)[rank], tp(rank, 4, 0)) == 0
    assert store.get_tensor_with_parallelism("k", ReadTarget("full", tp(0, 4, 0))) is None
    assert same(store.get_tensor_with_parallelism("k", ReadTarget("shard", tp(0, 2, 0))), tensor[:4])
    assert store.get_tensor_with_parallelism("k", ReadTarget("shard", tp(2, 4, 0))) is None
    assert store.get_tensor_with_parallelism("missing", ReadTarget("full", tp(0, 4, 0))) is None
    assert store.get_tensor_with_parallelism("missing", ReadTarget("full")) is None


def test_parts_that_do_not_belong_together_are_not_joined(store: MooncakeDistributedStore) -> None:
    assert store.put_tensor_with_parallelism("k", numbers(2), tp(0, 2, 0)) == 0
    assert store.put_tensor_with_parallelism("k", numbers(2).double(), tp(1, 2, 0)) == 0
    assert store.get_tensor_with_parallelism("k", ReadTarget("full", tp(0, 2, 0))) is None
    assert store.put_tensor_with_parallelism("l", numbers(2), tp(0, 2, 0)) == 0
    assert store.put_tensor_with_parallelism("l", numbers(3), tp(1, 2, 0)) == 0
    assert store.get_tensor_with_parallelism("l", ReadTarget("full", tp(0, 2, 0))) is None
    store.put("m__parallelism_manifest", b"x" * 96)
    assert store.get_tensor_with_parallelism("m", ReadTarget("full", tp(0, 2, 0))) is None


@pytest.mark.parametrize(
    "axes",
    [
        [],
        [ParallelAxis("tp", 0, 2)],
        [ParallelAxis("xp", 0, 2)],
        [ParallelAxis("reserved", 0, 2)],
        [ParallelAxis("tp", 2, 2, 0)],
        [ParallelAxis("tp", -1, 2, 0)],
        [ParallelAxis("tp", 0, 0, 0)],
        [ParallelAxis("tp", 0, 2, 5)],
        [ParallelAxis("dp", 0, 2, 0)],
        [ParallelAxis("ep", 0, 2)],
        [ParallelAxis("pp", 0, 2)],
        [ParallelAxis("tp", 0, 2, 0), ParallelAxis("tp", 0, 2, 1)],
        [SimpleNamespace(kind="tp")],
    ],
)
def test_wrong_axes_are_refused(store: MooncakeDistributedStore, axes: list[Any]) -> None:
    request = TensorParallelism(axes)
    assert store.put_tensor_with_parallelism("k", numbers(4, 4), request) == INVALID
    assert store.upsert_tensor_with_parallelism("k", numbers(4, 4), request) == INVALID
    assert store.get_tensor_with_parallelism("k", ReadTarget("shard", request)) is None
    assert store.get_tensor_with_parallelism("k", ReadTarget("full", request)) is None


def test_wrong_requests_are_refused(store: MooncakeDistributedStore) -> None:
    partition = SimpleNamespace(rank=0, size=2, split_dim=0)
    assert store.put_tensor_with_parallelism("k", numbers(4), tp(0, 2, 0), writer_partition=partition) == INVALID
    assert store.put_tensor_with_parallelism("k", numbers(3), writer_partition=partition) == INVALID
    assert store.put_tensor_with_parallelism("k", numbers(4), writer_partition=SimpleNamespace(rank=0)) == INVALID
    outside = SimpleNamespace(rank=2, size=2, split_dim=0)
    assert store.put_tensor_with_parallelism("k", numbers(4), writer_partition=outside) == INVALID
    assert store.put_tensor_with_parallelism("k", numbers(4), object()) == INVALID
    store.put_tensor("k", numbers(4))
    unknown = SimpleNamespace(mode="x", parallelism=None)
    for target in (ReadTarget("shard"), ReadTarget("as_stored", tp(0, 2, 0)), object(), unknown):
        assert store.get_tensor_with_parallelism("k", target) is None
    assert same(store.get_tensor_with_parallelism("k", ReadTarget("full")), numbers(4))
    with pytest.raises(RuntimeError):
        ReadTarget("half")


def test_requests_in_batches(store: MooncakeDistributedStore, arena: Arena) -> None:
    keys, tensors = ["a", "b"], [numbers(4), numbers(6)]
    for rank in range(2):
        parts = [tensor.chunk(2)[rank] for tensor in tensors]
        config = ReplicateConfig(group_ids=["g", "g"])
        assert store.batch_put_tensor_with_parallelism(keys, parts, [tp(rank, 2, 0)] * 2, config) == [0, 0]
    targets = [ReadTarget("full", tp(0, 2, 0))] * 2
    assert [same(*each) for each in zip(store.batch_get_tensor_with_parallelism(keys, targets), tensors, strict=True)]
    pointers = [arena.address, arena.address + 4096]
    into = store.batch_get_tensor_with_parallelism_into(keys, pointers, [900, 900], targets)
    assert same(into[1], numbers(6))
    assert store.batch_upsert_tensor_with_parallelism(keys, tensors) == [0, 0]
    assert same(store.batch_get_tensor_with_parallelism(keys)[0], numbers(4))
    places = [arena.write(numbers(4)), arena.write(numbers(8), 4096)]
    addresses, sizes = zip(*places, strict=True)
    partitions = [SimpleNamespace(rank=0, size=1, split_dim=0)] * 2
    write = store.batch_put_tensor_with_parallelism_from
    assert write(["c", "d"], addresses, sizes, writer_partitions=partitions) == [0, 0]
    assert same(store.get_tensor_with_parallelism("d", ReadTarget("full")), numbers(8))
    assert store.batch_upsert_tensor_with_parallelism_from(["c"], addresses[1:], sizes[1:]) == [0]
    assert same(store.get_tensor("c"), numbers(8))
    assert store.upsert_tensor_with_parallelism_from("c", addresses[0], sizes[0]) == 0
    wrong = [tp(0, 2, 0)]
    assert store.batch_put_tensor_with_parallelism(keys, tensors, wrong) == [INVALID] * 2
    assert store.batch_put_tensor_with_parallelism(keys, tensors, tuple(wrong * 2)) == [INVALID] * 2
    assert store.batch_put_tensor_with_parallelism(keys, tensors, wrong * 2, None, partitions) == [INVALID] * 2
    assert store.batch_get_tensor_with_parallelism(keys, targets[:1]) == [None, None]
    assert store.batch_get_tensor_with_parallelism_into(keys, pointers, [900], targets) == [None, None]


# files


def test_a_tensor_goes_to_a_file_and_back(store: MooncakeDistributedStore, tmp_path: Path) -> None:
    path = str(tmp_path / "one.safetensors")
    store.put_tensor("k", numbers(3, 2))
    assert store.save_tensor_to_safetensor("k", path) == 0
    assert same(store.load_tensor_from_safetensor("l", path), numbers(3, 2))
    assert same(store.get_tensor("l"), numbers(3, 2))
    assert same(store.load_tensor_from_safetensor(file_name=path), numbers(3, 2))
    assert store.is_exist(path) == 1
    assert store.save_tensor_to_safetensor("missing", path) == NO_FILE
    assert store.save_tensor_to_safetensor("k", str(tmp_path / "no" / "folder")) == INVALID
    assert store.load_tensor_from_safetensor("m", str(tmp_path / "missing")) is None
    (tmp_path / "bad").write_bytes(b"x" * 100)
    assert store.load_tensor_from_safetensor("m", str(tmp_path / "bad")) is None


# threads


def test_eight_threads_write_and_read(store: MooncakeDistributedStore) -> None:
    failures: list[str] = []

    def work(number: int) -> None:
        tensor = numbers(8, 8) + number
        for turn in range(5):
            key = f"{number}/{turn}"
            if store.put_tensor_with_tp(key, tensor, tp_size=4, split_dim=1) != 0:
                failures.append(key)
            if not same(store.get_tensor_with_parallelism(key, ReadTarget("full", tp(0, 4, 1))), tensor):
                failures.append(key)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
