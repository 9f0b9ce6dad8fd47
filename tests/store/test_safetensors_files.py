"""safetensors files into the pool and out of it; the safetensors package is the judge."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from facade_pool import FacadePool, facade_pool
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moonpool.base.errors import AlreadyExists, InvalidInput, NotFound
from moonpool.store import Store
from moonpool.store.safetensors_files import make_index, read_index
from moonpool.store.tensors import TensorForm


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FacadePool]:
    yield from facade_pool(tmp_path)


@pytest.fixture
def store(pool: FacadePool) -> Store:
    return pool.store()


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(100, 16).to(torch.bfloat16),
        "layer.0.weight": torch.randn(16, 16),
        "layer.0.bias": torch.randn(3).half(),
        "scale": torch.tensor(0.5, dtype=torch.float64),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 7),
        "fp8": torch.randn(5).to(torch.float8_e4m3fn),
        "large": torch.arange(400_000),
        "ids": torch.arange(3).to(torch.uint16),
        "wave": torch.tensor([1 + 2j]),
    }


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        left, right = (each.reshape(-1).contiguous().view(torch.uint8) for each in (found[name], tensor))
        assert torch.equal(left, right), name


def test_there_and_back(store: Store, tmp_path: Path) -> None:
    wanted = model()
    save_file(wanted, tmp_path / "in.safetensors")
    steps: list[tuple[int, int]] = []
    keys = store.load_safetensors(tmp_path / "in.safetensors", prefix="m/", progress=lambda *step: steps.append(step))
    assert sorted(keys) == sorted(f"m/{name}" for name in wanted)
    assert steps[-1][0] == steps[-1][1] > 3_000_000
    got = store.get_tensors([f"m/{name}" for name in wanted], like="torch")
    same({name: each for name, each in zip(wanted, got, strict=True) if each is not None}, wanted)

    store.put("other", b"not of the model")
    out = tmp_path / "out.safetensors"
    assert sorted(store.save_safetensors(out, prefix="m/", metadata={"format": "pt"})) == sorted(keys)
    same(load_file(out), wanted)
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == ["in.safetensors", "out.safetensors"]


def test_some_keys_and_column_major_arrays(store: Store, tmp_path: Path) -> None:
    columns = np.asfortranarray(np.arange(6, dtype=np.complex64).reshape(2, 3))
    store.put_tensors({"a": columns, "b": np.float32(2), "c": np.zeros(3)})
    store.save_safetensors(tmp_path / "some.safetensors", ["a", "b"])
    found = load_file(tmp_path / "some.safetensors")
    assert found.keys() == {"a", "b"}
    assert np.array_equal(found["a"].numpy(), columns)


def test_taken_keys(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(2)}, file)
    store.put("w", b"something else")
    with pytest.raises(AlreadyExists, match="w: "):
        store.load_safetensors(file)
    assert store.get("w") == b"something else"
    store.load_safetensors(file, replace=True)
    assert store.get_tensor("w").tolist() == [1, 1]  # type: ignore[union-attr]


def test_what_cannot_be_saved(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"older")
    store.put_tensor("t", np.ones(2))
    store.put("bytes", b"no tensor")
    store.put_tensor("wide", np.ones(2, np.complex128))
    store.put_tensor("__metadata__", np.ones(2))
    with pytest.raises(NotFound):
        store.save_safetensors(out, ["t", "none"])
    with pytest.raises(NotFound):
        store.save_safetensors(out, prefix="none/")
    for key in ("bytes", "wide", "__metadata__"):
        with pytest.raises(InvalidInput):
            store.save_safetensors(out, ["t", key])
    assert out.read_bytes() == b"older"
    with pytest.raises(InvalidInput, match="cannot write"):
        store.save_safetensors(tmp_path / "none" / "out", ["t"])
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"out.safetensors"}


def test_files_that_are_none(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "bad.safetensors"
    with pytest.raises(InvalidInput, match="cannot read"):
        store.load_safetensors(file)
    save_file(model(), file)
    whole = file.read_bytes()
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    cases = {
        "empty": b"",
        "short": whole[:7],
        "no JSON": struct.pack("<Q", 8) + b"not json",
        "a header that is too long": struct.pack("<Q", 1 << 60) + whole[8:],
        "cut off": whole[:-1],
        "more behind": whole + b"x",
        "another type": front({"t": {**entry, "dtype": "F3"}}) + bytes(8),
        "a hole": front({"t": {**entry, "data_offsets": [8, 16]}}) + bytes(16),
        "an overlap": front({"t": entry, "u": entry}) + bytes(8),
        "a wrong size": front({"t": {**entry, "shape": [3]}}) + bytes(8),
        "a negative size": front({"t": {**entry, "shape": [-2, -1]}}) + bytes(8),
        "a field missing": front({"t": {"dtype": "F32", "shape": [2]}}) + bytes(8),
    }
    for name, data in cases.items():
        file.write_bytes(data)
        try:
            store.load_safetensors(file)
        except InvalidInput:
            continue
        raise AssertionError(f"a file with {name} was taken")
    assert list(store.keys()) == []


def front(fields: dict[str, object]) -> bytes:
    text = json.dumps(fields).encode()
    return struct.pack("<Q", len(text)) + text


forms = st.builds(
    TensorForm,
    st.sampled_from(["bool", "bfloat16", "float32", "float64", "complex64", "float8_e5m2"]),
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
)


@given(st.dictionaries(st.text().filter(lambda name: name != "__metadata__"), forms))
def test_an_index_is_read_as_it_was_made(wanted: dict[str, TensorForm]) -> None:
    made, order = make_index(wanted, {"key": "value"})
    nbytes = len(made) + sum(form.nbytes for form in wanted.values())
    found = read_index(memoryview(made), nbytes)
    assert {tensor.name: tensor.form for tensor in found} == wanted
    assert len(made) % 8 == 0
    at = len(made)
    for name in order:
        tensor = next(each for each in found if each.name == name)
        assert tensor.start == at
        assert at % tensor.form.item_nbytes == 0
        at += tensor.form.nbytes
