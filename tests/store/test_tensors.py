"""Tensors in the pool: whatever goes in comes out, bit by bit, with its type, shape and order."""

from __future__ import annotations

import array as python_array
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from facade_pool import FacadePool
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from moonpool.base.errors import AlreadyExists, InvalidInput, NotFound
from moonpool.store import Store
from moonpool.store.tensors import ITEM_NBYTES, MAX_HEADER_NBYTES, TensorForm, unpack_form

TORCH_ONLY = [name for name in ITEM_NBYTES if name == "bfloat16" or name.startswith("float8")]
NUMPY_TYPES = [name for name in ITEM_NBYTES if name not in TORCH_ONLY]


@pytest.fixture(scope="module")
def pool() -> Iterator[FacadePool]:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        pool = FacadePool(Path(folder))
        try:
            yield pool
        finally:
            pool.close()


@pytest.fixture
def store(pool: FacadePool) -> Iterator[Store]:
    with Store(pool.address) as store:
        store.remove_all(force=True)
        yield store


arrays = hnp.arrays(
    dtype=st.sampled_from(NUMPY_TYPES).flatmap(
        lambda name: st.sampled_from([np.dtype(name), np.dtype(name).newbyteorder(">")])
    ),
    shape=hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=6),
)


def laid_out(array: NDArray[Any], how: str) -> NDArray[Any]:
    """The same values, lying otherwise in memory."""
    if how == "columns":
        return np.array(array, order="F")
    if how == "strided" and array.ndim:
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    return array


@pytest.fixture(scope="module")
def shared(pool: FacadePool) -> Iterator[Store]:
    """For hypothesis, which runs one test many times."""
    with Store(pool.address) as store:
        yield store


@settings(max_examples=150, deadline=None)
@given(array=arrays, how=st.sampled_from(["rows", "columns", "strided"]))
def test_every_array_comes_back(shared: Store, array: NDArray[Any], how: str) -> None:
    given_array = laid_out(array, how)
    wanted = array.astype(array.dtype.newbyteorder("<"))
    shared.put_tensor("t", given_array, replace=True)
    got = shared.get_tensor("t")
    seen = shared.view_tensor("t")
    assert got is not None
    assert seen is not None
    target = np.empty(array.shape, wanted.dtype, order="F" if len(array.shape) % 2 else "C")
    assert shared.get_tensor_into("t", target)
    for found in (got, seen, target):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert found.tobytes() == wanted.tobytes()  # both in row-major order
    assert got.flags.writeable
    assert not seen.flags.writeable or not seen.size
    as_torch = shared.get_tensor("t", like="torch")
    assert as_torch is not None
    assert tuple(as_torch.shape) == array.shape
    assert as_torch.contiguous().numpy().tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", TORCH_ONLY)
def test_torch_types_that_numpy_does_not_have(store: Store, dtype: str) -> None:
    raw = torch.arange(48, dtype=torch.uint8)
    tensor = raw.view(getattr(torch, dtype)).reshape(3, -1)
    assert store.put_tensor("t", tensor)
    got = store.get_tensor("t", like="torch")
    assert got is not None
    assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(got.reshape(-1).view(torch.uint8), raw)
    target = torch.empty_like(tensor)
    assert store.get_tensor_into("t", target)
    assert torch.equal(target.reshape(-1).view(torch.uint8), raw)
    with pytest.raises(InvalidInput, match="like='torch'"):
        store.get_tensor("t")


def test_torch_tensors(store: Store) -> None:
    grown = torch.randn(4, 6, requires_grad=True)
    cases = {
        "plain": torch.arange(10),
        "grad": grown,
        "transposed": torch.randn(3, 5).T,
        "strided": torch.randn(8, 8)[::2, 1::3],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "bools": torch.tensor([True, False]),
    }
    assert store.put_tensors(cases) == [None] * len(cases)
    for (name, wanted), got in zip(cases.items(), store.get_tensors(cases, like="torch"), strict=True):
        assert got is not None, name
        assert got.dtype == wanted.dtype, name
        assert torch.equal(got, wanted.detach()), name


def test_other_libraries_and_buffers(store: Store) -> None:
    class Foreign:
        """Speaks DLPack and nothing else."""

        def __init__(self) -> None:
            self.inner = np.arange(6, dtype=np.int16).reshape(2, 3)

        def __dlpack__(self, **options: Any) -> Any:
            return self.inner.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[Any, int]:
            return self.inner.__dlpack_device__()

    given_arrays = [Foreign(), python_array.array("d", [1.5, 2.5]), memoryview(b"abc"), np.int8(7)]
    for number, given_array in enumerate(given_arrays):
        store.put_tensor(f"t{number}", given_array)
    got: list[Any] = list(store.get_tensors([f"t{number}" for number in range(4)]))
    assert got[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert got[1].tolist() == [1.5, 2.5]
    assert got[2].tolist() == list(b"abc")
    assert (got[3].shape, int(got[3])) == ((), 7)


@pytest.mark.parametrize(
    "bad",
    [
        np.array(["text"]),
        np.array([object()]),
        np.array(["2020"], dtype="datetime64[s]"),
        np.zeros(2, dtype=[("a", "f4"), ("b", "i4")]),
        np.zeros(2, np.longdouble),
        torch.eye(3).to_sparse(),
        torch.ones(2, device="meta"),
        "text",
        [1, 2],
        None,
    ],
    ids=lambda bad: type(bad).__name__ + str(getattr(bad, "dtype", "")),
)
def test_what_is_no_tensor_is_refused(store: Store, bad: Any) -> None:
    with pytest.raises(InvalidInput):
        store.put_tensor("bad", bad)
    good, refused = store.put_tensors([("good", np.ones(2)), ("bad", bad)])
    assert good is None
    assert isinstance(refused, InvalidInput)
    assert not store.exist("bad")


def test_misses_and_mistakes(store: Store) -> None:
    store.put_tensor("t", np.ones((2, 3), np.float32))
    assert not store.put_tensor("t", np.zeros(1))
    assert isinstance(store.put_tensors({"t": np.zeros(1)})[0], AlreadyExists)
    assert store.get_tensors(["none", "t"])[0] is None
    assert store.get_tensors_into(["none", "t"], [np.zeros(1), np.zeros((2, 3), np.float32)]) == [False, True]
    with pytest.raises(NotFound):
        store.view_tensor("none")
    with pytest.raises(InvalidInput, match="jax"):
        store.get_tensor("t", like="jax")  # type: ignore[arg-type]
    wrong = [np.zeros((3, 2), np.float32), np.zeros((2, 3)), np.zeros(1, np.float32), np.zeros((9, 9), np.float32)]
    for target in wrong:
        with pytest.raises(InvalidInput, match=r"t holds a tensor of float32 \[2, 3\]"):
            store.get_tensor_into("t", target)
    read_only = np.zeros((2, 3), np.float32)
    read_only.flags.writeable = False
    for unfit in (read_only, np.zeros((2, 6), np.float32)[:, ::2], np.zeros((2, 3), ">f4")):
        with pytest.raises(InvalidInput):
            store.get_tensor_into("t", unfit)
    store.put("bytes", b"no tensor")
    store.put("lies", TensorForm("int8", (5,)).pack() + b"1234")
    for key in ("bytes", "lies"):
        with pytest.raises(InvalidInput, match=key):
            store.get_tensor(key)
        with pytest.raises(InvalidInput, match=key):
            store.view_tensor(key)


def test_large_tensors_are_seen_in_place(store: Store) -> None:
    """Several pieces, one array: no copy, and the bytes stay while anything made from it is used."""
    wanted = np.arange(700_000, dtype=np.float64).reshape(70, -1)
    store.put_tensor("large", wanted)
    seen = store.view_tensor("large")
    assert store.counters()["bytes_viewed"] >= wanted.nbytes
    part = seen[3:5]
    del seen
    store.remove("large", force=True)
    for number in range(30):
        store.put(f"other-{number}", b"\xff" * 2_000_000, replace=True)
    assert np.array_equal(part, wanted[3:5])


def test_a_tensor_far_away_is_copied(pool: FacadePool, store: Store) -> None:
    wanted = np.asfortranarray(np.random.default_rng(1).random((300, 700)))
    store.put_tensor("far", wanted)
    with Store(pool.address, shm=False) as far:
        assert np.array_equal(far.view_tensor("far"), wanted)
        assert far.counters()["bytes_viewed"] == 0
        assert np.array_equal(far.get_tensor("far"), wanted)  # type: ignore[arg-type]


@given(
    dtype=st.sampled_from(sorted(ITEM_NBYTES)),
    shape=st.lists(st.integers(0, 2**63), max_size=255).map(tuple),
    order=st.sampled_from(["C", "F"]),
)
def test_forms_survive_packing(dtype: str, shape: tuple[int, ...], order: Any) -> None:
    form = TensorForm(dtype, shape, order)
    packed = form.pack()
    assert len(packed) == form.header_nbytes <= MAX_HEADER_NBYTES
    assert len(packed) % 64 == 0
    assert unpack_form(memoryview(packed + b"elements")) == form


def test_the_form_on_the_wire() -> None:
    """The vector of docs/formats.md."""
    packed = TensorForm("bfloat16", (2, 3), "C").pack()
    front = "4d50544e01000002" + "62666c6f6174313600000000000000004000000000000000"
    assert packed.hex() == (front + "02000000000000000300000000000000").ljust(128, "0")


@pytest.mark.parametrize("at", [0, 4, 6, 9, 24])
def test_a_form_that_is_not_ours_is_refused(at: int) -> None:
    packed = bytearray(TensorForm("float32", (2, 3)).pack())
    packed[at] ^= 0x7F
    with pytest.raises(InvalidInput):
        unpack_form(memoryview(packed))
    with pytest.raises(InvalidInput):
        unpack_form(memoryview(TensorForm("float32", (2, 3)).pack()[:40]))
