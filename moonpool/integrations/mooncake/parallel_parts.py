"""`TensorFinder`: what a ReadTarget asks for, put together from the parts that ranks have stored.

The stored part is returned when it is the one asked for; otherwise the parts that hold the elements are fetched with
one call. They are joined only in the memory that the caller names (`TensorAssembly.write_to`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.parallel_layout import (
    Layout,
    WriterPartition,
    manifest_key,
    parse_target,
    writer_manifest_key,
)
from moonpool.integrations.mooncake.tensor_format import (
    HEADER_NBYTES,
    AxisKind,
    TensorHeader,
    unpack_header,
    unpack_manifest,
)
from moonpool.integrations.mooncake.tensor_slicing import Cut
from moonpool.transfer.memory.buffers import copy_bytes


@dataclass(frozen=True)
class TensorAssembly:
    """A tensor that was found: its header, and the parts its elements come from. Without a cut, one part has all."""

    header: TensorHeader
    parts: Sequence[tuple[int, memoryview]]
    cut: Cut | None = None
    span: range = range(0)

    def write_to(self, target: memoryview) -> None:
        if self.cut is not None:
            self.cut.join(self.parts, self.header.item_nbytes, self.span, target)
        elif target.nbytes:
            copy_bytes(target, self.parts[0][1])


class TensorFinder:
    """Looks for the objects of a tensor with `fetch`, which returns the values of keys, b"" for a miss."""

    def __init__(self, fetch: Callable[[Sequence[str]], list[bytes]]) -> None:
        self._fetch = fetch

    def find(self, key: str, target: Any) -> TensorAssembly | None:
        """Fetch what a ReadTarget asks for. None when it is not there; InvalidInput when it does not fit."""
        mode, layout = parse_target(target)
        if layout is None:
            if mode == "shard":
                raise InvalidInput("a read of a part needs axes")
            return (self._join_writers(key) if mode == "full" else None) or _whole(self._fetch([key])[0])
        if mode == "as_stored":
            raise InvalidInput("a read of a whole object takes no axes")
        return self._find_shard(key, layout) if mode == "shard" else self._find_full(key, layout)

    def _find_shard(self, key: str, layout: Layout) -> TensorAssembly | None:
        tp = layout.tp
        names = [layout.key(key), manifest_key(key)]
        if layout.is_plain_tp and tp is not None and tp.split_dim is not None:
            names.insert(1, WriterPartition(tp.rank, tp.size, tp.split_dim).key(key))
        *stored, manifest = self._fetch(names)
        for value in stored:
            found = _whole(value)
            if found is not None and layout.is_of(found.header):
                return found
        if tp is None:
            return None
        source = self._cut_of(key, layout, manifest)
        if source is None:
            return None
        header, cut = source
        wanted = Cut(cut.shape, cut.dim, tp.size)
        target = replace(header, local_shape=wanted.part_shape, is_shard=True, axes=layout.stored(wanted.part_shape))
        return self._join(target, cut, wanted.span(tp.rank), lambda rank: _place(key, layout, rank, cut.count))

    def _find_full(self, key: str, layout: Layout) -> TensorAssembly | None:
        if layout.tp is None:
            raise InvalidInput("only the parts of a TP axis can be joined")
        source = self._cut_of(key, layout, self._fetch([manifest_key(key)])[0])
        if source is None:
            return None
        header, cut = source
        whole = range(cut.shape[cut.dim])
        return self._join(header, cut, whole, lambda rank: _place(key, layout, rank, cut.count))

    def _join_writers(self, key: str) -> TensorAssembly | None:
        """Return the tensor that several writers stored; None when there is no such tensor."""
        value = self._fetch([writer_manifest_key(key)])[0]
        if not value:
            return None
        manifest = unpack_manifest(value)
        cut = Cut(manifest.global_shape, manifest.split_dim, manifest.num_shards)

        def place(rank: int) -> tuple[str, Layout]:
            writer = WriterPartition(rank, cut.count, cut.dim)
            return writer.key(key), writer.layout

        header = TensorHeader(manifest.element_type, cut.shape, cut.shape)
        return self._join(header, cut, range(cut.shape[cut.dim]), place)

    def _cut_of(self, key: str, layout: Layout, manifest: bytes) -> tuple[TensorHeader, Cut] | None:
        """Return the header of the whole tensor and how it was cut: by the manifest, else by the part of rank 0."""
        tp = layout.tp
        assert tp is not None, "the callers checked that there is a TP axis"
        if manifest:
            known = unpack_manifest(manifest)
            header = TensorHeader(known.element_type, known.global_shape, known.global_shape)
            split_dim, count = known.split_dim, known.num_shards
        else:
            first = _whole(self._fetch([layout.of_rank(0, tp.size).key(key)])[0])
            axis = None if first is None else first.header.axis(AxisKind.TP)
            if first is None or axis is None or not first.header.is_shard:
                return None
            header = replace(first.header, local_shape=first.header.global_shape, is_shard=False, axes=())
            split_dim, count = axis.split_dim, axis.count
        if split_dim != tp.split_dim:
            raise InvalidInput(f"the tensor was cut along dimension {split_dim}, not {tp.split_dim}")
        Cut(header.global_shape, split_dim, tp.size)  # refuses parts that are not equal
        return header, Cut(header.global_shape, split_dim, count)

    def _join(
        self, header: TensorHeader, cut: Cut, span: range, place: Callable[[int], tuple[str, Layout]]
    ) -> TensorAssembly | None:
        """Fetch the parts that hold `span`. None when one is missing; InvalidInput when one is another tensor's."""
        ranks = cut.overlapping(span)
        places = [place(rank) for rank in ranks]
        parts = []
        for rank, (name, layout), value in zip(ranks, places, self._fetch([name for name, _ in places]), strict=True):
            found = _whole(value)
            if found is None:
                return None
            part = found.header
            if not layout.is_of(part) or (part.element_type, part.local_shape) != (header.element_type, cut.part_shape):
                raise InvalidInput(f"{name} is not part {rank} of {cut.count} of the tensor")
            parts.append((rank, found.parts[0][1]))
        return TensorAssembly(header, parts, cut, span)


def _place(key: str, layout: Layout, rank: int, count: int) -> tuple[str, Layout]:
    part = layout.of_rank(rank, count)
    return part.key(key), part


def _whole(value: bytes) -> TensorAssembly | None:
    """Return a stored object as it is; None for a miss. InvalidInput when the object holds no tensor."""
    if not value:
        return None
    header = unpack_header(value)
    data = memoryview(value)[header.data_offset :]
    return TensorAssembly(replace(header, data_offset=HEADER_NBYTES), [(0, data)])
