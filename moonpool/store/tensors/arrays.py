"""Arrays of numpy, torch and others as a form and plain bytes, and back. Imports torch only when asked for its tensors.

Going in: contiguous arrays are taken as they lie, also column-major ones; others are copied. Elements become
little-endian. What has no place in a TensorForm (objects, texts, records, times) is refused with InvalidInput.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import InvalidInput
from moonpool.store.tensors.tensor_form import ITEM_NBYTES, TensorForm
from moonpool.transfer.memory.buffers import as_bytes_view

Library: TypeAlias = Literal["numpy", "torch"]


def is_torch(array: object) -> bool:
    """Known without importing torch."""
    return hasattr(array, "data_ptr") and str(getattr(array, "dtype", "")).startswith("torch.")


def as_source(array: Any) -> tuple[TensorForm, memoryview]:
    """What to store of it. The bytes borrow the array's memory, or a copy's."""
    if is_torch(array):
        return _torch_source(array)
    found = _as_numpy(array)
    if not found.flags.c_contiguous and not found.flags.f_contiguous:
        found = np.ascontiguousarray(found)
    if found.dtype.byteorder == ">":
        found = found.astype(found.dtype.newbyteorder("<"))  # keeps the order
    return _numpy_bytes(found, writable=False)


def as_target(array: Any) -> tuple[TensorForm, memoryview]:
    """Where to read to. InvalidInput unless it is contiguous, writable and little-endian."""
    if is_torch(array):
        return _torch_form(array), as_bytes_view(array, writable=True)
    if not isinstance(array, np.ndarray):
        array = _as_numpy(array)
    if array.dtype.byteorder == ">":
        raise InvalidInput("the array is big-endian; tensors are read into little-endian ones")
    return _numpy_bytes(array, writable=True)


def as_numpy(form: TensorForm, elements: memoryview) -> NDArray[Any]:
    """An array over these bytes. InvalidInput when numpy has no such element type (bfloat16 without ml_dtypes)."""
    try:
        dtype = np.dtype(form.dtype)
    except TypeError as error:
        raise InvalidInput(f"numpy has no {form.dtype}; ask for like='torch'") from error
    return _shaped(np.frombuffer(elements, np.uint8).view(dtype), form)


def as_torch(form: TensorForm, elements: memoryview) -> Any:
    """A torch tensor over these bytes, which must be writable."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise InvalidInput("torch is not installed; ask for like='numpy'") from error
    dtype = getattr(torch, form.dtype, None)
    if dtype is None:
        raise InvalidInput(f"torch {torch.__version__} has no {form.dtype}")
    flat = torch.from_numpy(np.frombuffer(elements, np.uint8)).view(dtype)
    if form.order == "F":
        return flat.reshape(form.shape[::-1]).permute(*reversed(range(len(form.shape))))
    return flat.reshape(form.shape)


def row_major(form: TensorForm, elements: memoryview) -> memoryview:
    """The elements in row-major order; a copy only if they lie otherwise. For any element type."""
    if form.order == "C":
        return elements
    opaque = _shaped(np.frombuffer(elements, np.dtype((np.void, form.item_nbytes))), form)
    return memoryview(opaque.tobytes())


def _shaped(flat: NDArray[Any], form: TensorForm) -> NDArray[Any]:
    return flat.reshape(form.shape) if form.order == "C" else flat.reshape(form.shape[::-1]).T


def _numpy_bytes(array: NDArray[Any], writable: bool) -> tuple[TensorForm, memoryview]:
    if array.dtype.name not in ITEM_NBYTES:
        raise InvalidInput(f"arrays of {array.dtype} cannot be stored as tensors; there are {', '.join(ITEM_NBYTES)}")
    column_major = array.flags.f_contiguous and not array.flags.c_contiguous
    form = TensorForm(array.dtype.name, array.shape, "F" if column_major else "C")
    if array.dtype.kind == "V":  # a type of ml_dtypes, which has no format of the buffer protocol
        array = array.view(f"u{array.dtype.itemsize}")
    return form, as_bytes_view(array.T if column_major else array, writable)


def _torch_form(tensor: Any) -> TensorForm:
    if str(tensor.layout) != "torch.strided":
        raise InvalidInput(f"a tensor of layout {tensor.layout} cannot be stored; use .to_dense()")
    return TensorForm(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _torch_source(tensor: Any) -> tuple[TensorForm, memoryview]:
    form = _torch_form(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg()
    return form, as_bytes_view(plain.contiguous(), writable=False)


def _as_numpy(array: Any) -> NDArray[Any]:
    if isinstance(array, np.ndarray):
        return array
    try:
        if hasattr(array, "__array_interface__") or hasattr(array, "__array__"):
            return np.asarray(array)
        if hasattr(array, "__dlpack__"):
            return np.from_dlpack(array)
        return np.asarray(memoryview(array))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidInput(f"{type(array).__name__} is no array: {error}") from error
