"""Tensors in the pool: arrays of numpy, torch and others, stored with element type, shape and order.

A contiguous array is stored from its own memory, row-major or column-major; others are copied first. Elements become
little-endian. Element types that TensorForm does not have (objects, text, records, times) raise InvalidInput. torch is
imported only when a caller asks for torch tensors.

A stored tensor begins with a header (docs/formats.md, tensor header, version 1):

    0   magic  "MPTN"        8   element type, ASCII, zeros behind it   16 bytes
    4   version      u16     24  header size, padding included          u32
    6   order        u8      28  reserved = 0                           u32
    7   dimensions   u8      32  shape, u64 each; zeros to a multiple of 64 bytes

The header is the first piece of the object. The elements follow, little-endian, without gaps, row-major (order 0) or
column-major (order 1).
"""

from __future__ import annotations

import importlib
import math
import struct
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import InvalidInput
from moonpool.transfer.memory.buffers import as_bytes_view

Order: TypeAlias = Literal["C", "F"]

MAGIC = b"MPTN"
VERSION = 1
ALIGN_NBYTES = 64  # enough for the alignment of every element type
FIXED_NBYTES = 32
_FIXED = struct.Struct("<4sHBB16sII")
_ORDERS: tuple[Order, Order] = ("C", "F")
MAX_DIMENSIONS = 255
MAX_HEADER_NBYTES = 2112  # with MAX_DIMENSIONS

# Element types by their name in numpy, ml_dtypes and torch, and their size.
ITEM_NBYTES = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


@dataclass(frozen=True)
class TensorForm:
    dtype: str
    shape: tuple[int, ...]
    order: Order = "C"

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_NBYTES:
            raise InvalidInput(f"tensors of {self.dtype} cannot be stored; there are {', '.join(ITEM_NBYTES)}")
        if len(self.shape) > MAX_DIMENSIONS:
            raise InvalidInput(f"a tensor has at most {MAX_DIMENSIONS} dimensions, not {len(self.shape)}")

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def item_nbytes(self) -> int:
        return ITEM_NBYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Size of the elements."""
        return self.item_nbytes * math.prod(self.shape)

    @property
    def header_nbytes(self) -> int:
        return -(-(FIXED_NBYTES + 8 * len(self.shape)) // ALIGN_NBYTES) * ALIGN_NBYTES

    def pack(self) -> bytes:
        fixed = _FIXED.pack(
            MAGIC,
            VERSION,
            _ORDERS.index(self.order),
            len(self.shape),
            self.dtype.encode(),
            self.header_nbytes,
            0,
        )
        return (fixed + struct.pack(f"<{len(self.shape)}Q", *self.shape)).ljust(self.header_nbytes, b"\0")


def unpack_form(data: memoryview) -> TensorForm:
    """Read the form from the first bytes of an object. InvalidInput when it holds no tensor, or a later version."""
    if data.nbytes < FIXED_NBYTES or bytes(data[:4]) != MAGIC:
        raise InvalidInput("it holds no tensor")
    _, version, order, num_dimensions, name, header_nbytes, _ = _FIXED.unpack_from(data)
    if version != VERSION or order >= len(_ORDERS):
        raise InvalidInput(f"it holds a tensor of version {version}, which this program does not know")
    if data.nbytes < FIXED_NBYTES + 8 * num_dimensions:
        raise InvalidInput("its tensor header is cut off")
    shape = struct.unpack_from(f"<{num_dimensions}Q", data, FIXED_NBYTES)
    form = TensorForm(name.rstrip(b"\0").decode("ascii", "replace"), shape, _ORDERS[order])
    if header_nbytes != form.header_nbytes:
        raise InvalidInput(f"its tensor header has {header_nbytes} bytes instead of {form.header_nbytes}")
    return form


Library: TypeAlias = Literal["numpy", "torch"]


def is_torch(array: object) -> bool:
    """Return whether the array is a torch tensor, without importing torch."""
    return hasattr(array, "data_ptr") and str(getattr(array, "dtype", "")).startswith("torch.")


def as_source(array: Any) -> tuple[TensorForm, memoryview]:
    """Return the form and the bytes to store. The bytes are the array's own memory, or a copy."""
    if is_torch(array):
        return _torch_source(array)
    found = _as_numpy(array)
    if not found.flags.c_contiguous and not found.flags.f_contiguous:
        found = np.ascontiguousarray(found)
    if found.dtype.byteorder == ">":
        found = found.astype(found.dtype.newbyteorder("<"))  # keeps the order
    return _numpy_bytes(found, writable=False)


def as_target(array: Any) -> tuple[TensorForm, memoryview]:
    """Return the form and the memory to read into. InvalidInput unless it is contiguous, writable, little-endian."""
    if is_torch(array):
        return _torch_form(array), as_bytes_view(array, writable=True)
    if not isinstance(array, np.ndarray):
        array = _as_numpy(array)
    if array.dtype.byteorder == ">":
        raise InvalidInput("the array is big-endian; tensors are read into little-endian ones")
    return _numpy_bytes(array, writable=True)


def as_numpy(form: TensorForm, elements: memoryview) -> NDArray[Any]:
    """Return an array over these bytes. InvalidInput when numpy lacks the type (bfloat16 without ml_dtypes)."""
    try:
        dtype = np.dtype(form.dtype)
    except TypeError as error:
        raise InvalidInput(f"numpy has no {form.dtype}; ask for like='torch'") from error
    return _shaped(np.frombuffer(elements, np.uint8).view(dtype), form)


def as_torch(form: TensorForm, elements: memoryview) -> Any:
    """Return a torch tensor over these bytes, which must be writable."""
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
    """Return the elements in row-major order, copied only if they are column-major. For any element type."""
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
