"""Parts of tensors as bytes: which rows a rank has, cutting a part out, and joining parts. Pure, without torch.

A part (shard) is a range along one dimension. Only equal parts exist: a size that the number of parts does not divide
is refused, as upstream refuses it. Elements are row-major, so a part of a tensor of shape (a, b, c) along dimension 1
is, for each of `a` rows, one run of consecutive bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.tensor_format import AxisKind, StoredAxis, TensorHeader

Parts = list[memoryview]  # header and elements of one object


@dataclass(frozen=True)
class Cut:
    """A tensor cut into `count` equal parts along dimension `dim`. InvalidInput when that is not possible."""

    shape: tuple[int, ...]
    dim: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.dim < len(self.shape) or self.count <= 0:
            raise InvalidInput(f"shape {list(self.shape)} cannot be cut into {self.count} along dimension {self.dim}")
        if self.shape[self.dim] % self.count:
            raise InvalidInput(
                f"dimension {self.dim} of {list(self.shape)} cannot be cut into {self.count} equal parts"
            )

    @property
    def extent(self) -> int:
        """Size of each part along the dimension."""
        return self.shape[self.dim] // self.count

    @property
    def part_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.extent, *self.shape[self.dim + 1 :])

    def span(self, rank: int) -> range:
        """Return the indices of one part along the dimension."""
        if not 0 <= rank < self.count:
            raise InvalidInput(f"there is no part {rank} of {self.count}")
        return range(rank * self.extent, (rank + 1) * self.extent)

    def overlapping(self, span: range) -> list[int]:
        """Return the parts that hold some of `span`. An empty span has none."""
        return [rank for rank in range(self.count) if len(_overlap(self.span(rank), span))]

    def take(self, data: memoryview, item_nbytes: int, rank: int) -> memoryview:
        """Return the bytes of one part: a view of `data` where they are consecutive there, else a copy."""
        rows = _rows(data, self.shape, self.dim, item_nbytes)
        span = self.span(rank)
        run_nbytes = math.prod(self.shape[self.dim + 1 :]) * item_nbytes
        return np.ascontiguousarray(rows[:, span.start * run_nbytes : span.stop * run_nbytes]).reshape(-1).data

    def join(self, parts: Sequence[tuple[int, memoryview]], item_nbytes: int, span: range, target: memoryview) -> None:
        """Write the elements of `span` along the dimension to `target`, from parts (rank, bytes) that hold them."""
        target_shape = (*self.shape[: self.dim], len(span), *self.shape[self.dim + 1 :])
        if target.nbytes != math.prod(target_shape) * item_nbytes:
            raise InvalidInput(f"{target.nbytes} bytes are no target for shape {list(target_shape)}")
        if not target.nbytes:
            return
        run_nbytes = math.prod(self.shape[self.dim + 1 :]) * item_nbytes
        to = _rows(target, target_shape, self.dim, item_nbytes)
        for rank, data in parts:
            whole = self.span(rank)
            both = _overlap(whole, span)
            source = _rows(data, self.part_shape, self.dim, item_nbytes)
            to[:, _runs(both, span, run_nbytes)] = source[:, _runs(both, whole, run_nbytes)]


def object_parts(header: TensorHeader, data: memoryview) -> Parts:
    """Return the pieces of an object; a tensor without elements is its header alone."""
    packed = memoryview(header.pack())
    return [packed, data] if data.nbytes else [packed]


def shard(header: TensorHeader, data: memoryview, cut: Cut, rank: int, axes: tuple[StoredAxis, ...]) -> Parts:
    """Return the object of one part of a whole tensor."""
    part = replace(header, global_shape=cut.shape, local_shape=cut.part_shape, is_shard=True, axes=axes)
    return object_parts(part, cut.take(data, header.item_nbytes, rank))


def tp_shards(header: TensorHeader, data: memoryview, tp_size: int, split_dim: int) -> list[Parts]:
    """Return the objects of all parts of a whole tensor. InvalidInput when the parts would not be equal."""
    cut = whole_cut(header, split_dim, tp_size)
    axes = [StoredAxis(AxisKind.TP, 0, rank, tp_size, split_dim, 0, cut.extent) for rank in range(tp_size)]
    return [shard(header, data, cut, axis.rank, (axis,)) for axis in axes]


def whole_cut(header: TensorHeader, split_dim: int, count: int) -> Cut:
    """Return the cut of a whole tensor. InvalidInput for a tensor that is itself a part, or unequal parts."""
    if header.local_shape != header.global_shape:
        raise InvalidInput(f"a part {list(header.local_shape)} of {list(header.global_shape)} cannot be cut again")
    return Cut(header.local_shape, split_dim, count)


def _overlap(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))


def _runs(span: range, whole: range, run_nbytes: int) -> slice:
    """Return the bytes of `span` in a row that holds `whole`."""
    return slice((span.start - whole.start) * run_nbytes, (span.stop - whole.start) * run_nbytes)


def _rows(data: memoryview, shape: Sequence[int], dim: int, item_nbytes: int) -> NDArray[np.uint8]:
    """Return the bytes as one row for each index in front of `dim`."""
    row_nbytes = math.prod(shape[dim:]) * item_nbytes
    num_rows = math.prod(shape[:dim])
    if data.nbytes != num_rows * row_nbytes:
        raise InvalidInput(f"{data.nbytes} bytes are no tensor of shape {list(shape)}")
    if not data.nbytes:
        return np.zeros((1, 0), np.uint8)  # the other sizes may be too large for an array
    return np.frombuffer(data, np.uint8).reshape(num_rows, row_nbytes)
