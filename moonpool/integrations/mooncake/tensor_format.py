"""The bytes in front of a tensor in Mooncake's format, and the small object that says how a tensor was cut.

An object is a header of 304 bytes and the elements, row-major. Everything is little-endian:

    0    magic 0x4d4f4f4e   u32      40   shape of the whole tensor   8 x i64, unused are -1
    4    version 1          u16      104  shape of this part          8 x i64, unused are -1
    6    header size 304    u16      168  number of axes, zero        2 x u32
    8    element type       i32      176  4 axes of 32 bytes:
    12   dimensions         i32           kind (DP 0, TP 1, EP 2, PP 3), position, rank, count, split dimension or -1,
    16   whole 0, part 1    u32           expert or stage number      6 x i32
    20   zero               u32           size of this part along the split dimension  i64
    24   offset of elements u64
    32   size of elements   u64

A manifest of 96 bytes lies beside the parts of a tensor: magic 0x574d414e, version 1 and size 96 as above, then element
type, dimensions, split dimension, number of parts and zero (5 x i32), 4 bytes of padding, shape of the whole tensor.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from moonpool.base.errors import InvalidInput

MAX_DIMENSIONS = 8
MAX_AXES = 4
# Element types by their name in torch, in the order of their numbers, with the size of an element.
ELEMENT_TYPES: tuple[tuple[str, int], ...] = (
    ("float32", 4),
    ("float64", 8),
    ("int8", 1),
    ("uint8", 1),
    ("int16", 2),
    ("uint16", 2),
    ("int32", 4),
    ("uint32", 4),
    ("int64", 8),
    ("uint64", 8),
    ("bool", 1),
    ("float16", 2),
    ("bfloat16", 2),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
)
ELEMENT_NUMBERS = {name: number for number, (name, _) in enumerate(ELEMENT_TYPES)}

_MAGIC, _MANIFEST_MAGIC, _VERSION = 0x4D4F4F4E, 0x574D414E, 1
_FIXED = struct.Struct("<IHHiiIIQQ")
_SHAPE = struct.Struct("<8q")
_COUNT = struct.Struct("<II")
_AXIS = struct.Struct("<iiiiiiq")
_MANIFEST = struct.Struct("<IHHiiiii4x8q")
HEADER_NBYTES = _FIXED.size + 2 * _SHAPE.size + _COUNT.size + MAX_AXES * _AXIS.size
MANIFEST_NBYTES = _MANIFEST.size


class AxisKind(IntEnum):
    """What a tensor is divided among. RESERVED has no meaning yet; a header may hold it."""

    DP = 0
    TP = 1
    EP = 2
    PP = 3
    RESERVED = 4


@dataclass(frozen=True)
class StoredAxis:
    """One axis as the header holds it. `number` is the expert of an EP axis, the stage of a PP axis, else 0."""

    kind: AxisKind
    position: int
    rank: int
    count: int
    split_dim: int = -1
    number: int = 0
    extent: int = 0

    def check(self, num_dimensions: int) -> None:
        if not 0 <= self.rank < self.count:
            raise InvalidInput(f"a tensor header has an axis with rank {self.rank} of {self.count}")
        if not -1 <= self.split_dim < num_dimensions:
            raise InvalidInput(f"a tensor header splits dimension {self.split_dim} of {num_dimensions}")


@dataclass(frozen=True)
class TensorHeader:
    """Element type and shapes of a stored tensor. A part of a tensor (`is_shard`) also has axes."""

    element_type: int
    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    is_shard: bool = False
    axes: tuple[StoredAxis, ...] = ()
    data_offset: int = HEADER_NBYTES

    def __post_init__(self) -> None:
        """Raise InvalidInput for what the format cannot hold."""
        if not 0 <= self.element_type < len(ELEMENT_TYPES):
            raise InvalidInput(f"there is no element type {self.element_type}")
        if len(self.local_shape) > MAX_DIMENSIONS or len(self.local_shape) != len(self.global_shape):
            raise InvalidInput(f"shapes {self.global_shape} and {self.local_shape} are no tensor and a part of it")
        if any(size < 0 for size in (*self.global_shape, *self.local_shape)):
            raise InvalidInput(f"shape {self.local_shape} of {self.global_shape} has a negative size")
        if len(self.axes) > MAX_AXES:
            raise InvalidInput(f"a tensor header has at most {MAX_AXES} axes, not {len(self.axes)}")
        if self.data_offset < HEADER_NBYTES:
            raise InvalidInput(f"elements at {self.data_offset} would overlap the tensor header")
        for axis in self.axes:
            axis.check(len(self.local_shape))

    @property
    def item_nbytes(self) -> int:
        return ELEMENT_TYPES[self.element_type][1]

    @property
    def type_name(self) -> str:
        """Name of the element type in torch."""
        return ELEMENT_TYPES[self.element_type][0]

    @property
    def data_nbytes(self) -> int:
        return math.prod(self.local_shape) * self.item_nbytes

    @property
    def nbytes(self) -> int:
        """Size of the stored object."""
        return self.data_offset + self.data_nbytes

    def axis(self, kind: AxisKind) -> StoredAxis | None:
        return next((axis for axis in self.axes if axis.kind is kind), None)

    def pack(self) -> bytes:
        fixed = _FIXED.pack(
            _MAGIC,
            _VERSION,
            HEADER_NBYTES,
            self.element_type,
            len(self.local_shape),
            int(self.is_shard),
            0,
            self.data_offset,
            self.data_nbytes,
        )
        axes = b"".join(
            _AXIS.pack(axis.kind, axis.position, axis.rank, axis.count, axis.split_dim, axis.number, axis.extent)
            for axis in self.axes
        )
        shapes = _pack_shape(self.global_shape) + _pack_shape(self.local_shape)
        return (fixed + shapes + _COUNT.pack(len(self.axes), 0) + axes).ljust(HEADER_NBYTES, b"\0")


def unpack_header(data: memoryview | bytes, nbytes: int | None = None) -> TensorHeader:
    """Read the header at the start of an object of `nbytes` (default: all of `data`). InvalidInput if it is none."""
    total_nbytes = len(data) if nbytes is None else nbytes
    if len(data) < HEADER_NBYTES or total_nbytes < HEADER_NBYTES:
        raise InvalidInput(f"{total_nbytes} bytes are too few for a tensor header of {HEADER_NBYTES}")
    magic, version, size, element_type, num_dims, kind, _, offset, data_nbytes = _FIXED.unpack_from(data)
    if (magic, version, size) != (_MAGIC, _VERSION, HEADER_NBYTES) or kind not in (0, 1):
        raise InvalidInput("the object holds no tensor")
    at = _FIXED.size
    global_shape, local_shape = (_unpack_shape(data, start, num_dims) for start in (at, at + _SHAPE.size))
    at += 2 * _SHAPE.size
    num_axes, _ = _COUNT.unpack_from(data, at)
    if num_axes > MAX_AXES:
        raise InvalidInput(f"the tensor header has {num_axes} axes")
    axes = [_unpack_axis(data, at + _COUNT.size + each * _AXIS.size) for each in range(num_axes)]
    header = TensorHeader(element_type, global_shape, local_shape, kind == 1, tuple(axes), offset)
    if data_nbytes != header.data_nbytes or header.nbytes != total_nbytes:
        raise InvalidInput(f"a tensor of {data_nbytes} bytes at {offset} does not fill the object's {total_nbytes}")
    return header


@dataclass(frozen=True)
class Manifest:
    """How a tensor was cut: into `num_shards` equal parts along `split_dim`."""

    element_type: int
    global_shape: tuple[int, ...]
    split_dim: int
    num_shards: int

    def pack(self) -> bytes:
        shape = (*self.global_shape, *[-1] * (MAX_DIMENSIONS - len(self.global_shape)))
        numbers = (self.element_type, len(self.global_shape), self.split_dim, self.num_shards, 0)
        return _MANIFEST.pack(_MANIFEST_MAGIC, _VERSION, MANIFEST_NBYTES, *numbers, *shape)


def unpack_manifest(data: memoryview | bytes) -> Manifest:
    """Read a manifest. InvalidInput if it is none."""
    if len(data) < MANIFEST_NBYTES:
        raise InvalidInput("the object holds no manifest of a tensor")
    magic, version, size, element_type, num_dims, split_dim, num_shards, _, *shape = _MANIFEST.unpack_from(data)
    if (magic, version, size) != (_MANIFEST_MAGIC, _VERSION, MANIFEST_NBYTES):
        raise InvalidInput("the object holds no manifest of a tensor")
    if not 0 <= split_dim < num_dims <= MAX_DIMENSIONS or num_shards <= 0 or min(shape[:num_dims]) < 0:
        raise InvalidInput(f"the manifest cuts dimension {split_dim} of {num_dims} into {num_shards}")
    if not 0 <= element_type < len(ELEMENT_TYPES):
        raise InvalidInput(f"there is no element type {element_type}")
    return Manifest(element_type, tuple(shape[:num_dims]), split_dim, num_shards)


def _pack_shape(shape: Sequence[int]) -> bytes:
    return _SHAPE.pack(*shape, *[-1] * (MAX_DIMENSIONS - len(shape)))


def _unpack_shape(data: memoryview | bytes, start: int, num_dims: int) -> tuple[int, ...]:
    shape = _SHAPE.unpack_from(data, start)
    if not 0 <= num_dims <= MAX_DIMENSIONS or any(size != -1 for size in shape[num_dims:]):
        raise InvalidInput(f"the tensor header has {num_dims} dimensions and sizes {list(shape)}")
    return shape[:num_dims]


def _unpack_axis(data: memoryview | bytes, start: int) -> StoredAxis:
    kind, *numbers = _AXIS.unpack_from(data, start)
    if kind not in AxisKind.__members__.values():
        raise InvalidInput(f"the tensor header has an axis of kind {kind}")
    return StoredAxis(AxisKind(kind), *numbers)
