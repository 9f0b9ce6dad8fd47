"""What a stored tensor is: element type, shape and order of its bytes (docs/formats.md, tensor header, version 1).

    0   magic  "MPTN"        8   element type, ASCII, zeros behind it   16 bytes
    4   version      u16     24  header size, padding included          u32
    6   order        u8      28  reserved = 0                           u32
    7   dimensions   u8      32  shape, u64 each; zeros to a multiple of 64 bytes

It is the first piece of the object; the elements follow, little-endian, without gaps: row-major (order 0) or, of an
array that lies so in memory, column-major (order 1). Pure; knows no library of arrays.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Literal, TypeAlias

from moonpool.base.errors import InvalidInput

Order: TypeAlias = Literal["C", "F"]

MAGIC = b"MPTN"
VERSION = 1
ALIGN_NBYTES = 64  # so that the elements are as aligned as any of them wants
FIXED_NBYTES = 32
_FIXED = struct.Struct("<4sHBB16sII")
_ORDERS: tuple[Order, Order] = ("C", "F")
MAX_DIMENSIONS = 255
MAX_HEADER_NBYTES = 2112  # with so many

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
        """Of the elements."""
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
    """From the first bytes of an object. InvalidInput when it holds no tensor, or one of a later version."""
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
