"""`ParallelTensorCalls`: tensors that ranks write in parts, read by other ranks in parts of another size or as a whole.

A write follows a request (parallel_layout.py). A read returns the stored part when it is the one asked for; otherwise
the parts that hold the elements are fetched with one call and joined. Reads return None for what is missing or does not
fit the request; writes return 0 or an error, -600 for a request that upstream refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.integrations.mooncake.parallel_layout import (
    Layout,
    WriterPartition,
    manifest_key,
    parse_layout,
    parse_partition,
    parse_target,
    plan_write,
    plan_write_all,
    tp_key,
    writer_manifest_key,
)
from moonpool.integrations.mooncake.tensor_format import (
    HEADER_NBYTES,
    AxisKind,
    TensorHeader,
    unpack_header,
    unpack_manifest,
)
from moonpool.integrations.mooncake.tensor_memory import new_tensor, tensor_of, tensor_parts
from moonpool.integrations.mooncake.tensor_slicing import Cut, Parts
from moonpool.integrations.mooncake.tensors import WholeTensorCalls
from moonpool.integrations.mooncake.types import ReplicateConfig
from moonpool.transfer.memory.buffers import as_bytes_view, copy_bytes

if TYPE_CHECKING:
    import torch


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


class ParallelTensorCalls(WholeTensorCalls):
    """Tensors by key and request. Results of a batch are by position."""

    # writes

    def put_tensor_with_parallelism(
        self,
        key: str,
        tensor: Any,
        parallelism: Any = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """Store one part of a tensor, as `parallelism` or `writer_partition` asks; the tensor itself without either.
        With TP as the only axis, the tensor is the part; otherwise it is the whole tensor and the part is cut out.
        """
        return self._write_tensor(key, tensor, parallelism, config, writer_partition, False)

    def upsert_tensor_with_parallelism(
        self,
        key: str,
        tensor: Any,
        parallelism: Any = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        return self._write_tensor(key, tensor, parallelism, config, writer_partition, True)

    def put_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Any = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        """Store from registered memory that holds header and elements of a whole tensor. A request with a TP axis
        stores the parts of all ranks.
        """
        return self._write_from(key, buffer_ptr, size, parallelism, config, writer_partition, False)

    def upsert_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Any = None,
        config: ReplicateConfig | None = None,
        writer_partition: Any = None,
    ) -> int:
        return self._write_from(key, buffer_ptr, size, parallelism, config, writer_partition, True)

    def batch_put_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[Any],
        parallelisms: Any = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Any = None,
    ) -> list[int]:
        write = self.put_tensor_with_parallelism
        return self._write_each(keys, [tensors_list], parallelisms, config, writer_partitions, write)

    def batch_upsert_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[Any],
        parallelisms: Any = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Any = None,
    ) -> list[int]:
        write = self.upsert_tensor_with_parallelism
        return self._write_each(keys, [tensors_list], parallelisms, config, writer_partitions, write)

    def batch_put_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Any = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Any = None,
    ) -> list[int]:
        write = self.put_tensor_with_parallelism_from
        return self._write_each(keys, [buffer_ptrs, sizes], parallelisms, config, writer_partitions, write)

    def batch_upsert_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Any = None,
        config: ReplicateConfig | None = None,
        writer_partitions: Any = None,
    ) -> list[int]:
        write = self.upsert_tensor_with_parallelism_from
        return self._write_each(keys, [buffer_ptrs, sizes], parallelisms, config, writer_partitions, write)

    # reads

    def get_tensor_with_parallelism(self, key: str, target: Any = None) -> torch.Tensor | None:
        """Return the tensor, or the part of it, that a ReadTarget asks for. A part that was stored without axes is
        returned as it is.
        """
        found = self._or_none("get", key, self._find, key, target)
        if found is None:
            return self._unmarked_part(key, target)
        tensor = new_tensor(found.header)
        found.write_to(as_bytes_view(tensor, writable=True))
        return tensor

    def batch_get_tensor_with_parallelism(self, keys: Sequence[str], targets: Any = None) -> list[torch.Tensor | None]:
        if targets is None:
            return self.batch_get_tensor(keys)
        if not isinstance(targets, list) or len(targets) != len(keys):
            return [None] * len(keys)
        return [self.get_tensor_with_parallelism(*each) for each in zip(keys, targets, strict=True)]

    def get_tensor_with_parallelism_into(
        self, key: str, buffer_ptr: int, size: int, target: Any = None
    ) -> torch.Tensor | None:
        """As get_tensor_with_parallelism(), into registered memory, header first. Return the tensor over it."""

        def read() -> torch.Tensor | None:
            found = self._find(key, target)
            if found is None:
                return None
            if found.header.nbytes > size:
                raise InvalidInput(f"{size} bytes are too few for a tensor of {found.header.nbytes}")
            memory = self._memory.view(buffer_ptr, found.header.nbytes)
            memory[:HEADER_NBYTES] = found.header.pack()
            found.write_to(memory[HEADER_NBYTES:])
            return tensor_of(found.header, memory[HEADER_NBYTES:])

        return self._or_none("get", key, read)

    def batch_get_tensor_with_parallelism_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], targets: Any = None
    ) -> list[torch.Tensor | None]:
        wanted = [None] * len(keys) if targets is None else targets
        if not isinstance(wanted, list) or not len(keys) == len(buffer_ptrs) == len(sizes) == len(wanted):
            return [None] * len(keys)
        return [
            self.get_tensor_with_parallelism_into(*each) for each in zip(keys, buffer_ptrs, sizes, wanted, strict=True)
        ]

    # writing

    def _write_tensor(
        self, key: str, tensor: Any, parallelism: Any, config: ReplicateConfig | None, partition: Any, upsert: bool
    ) -> int:
        def plan() -> list[tuple[str, Parts]]:
            layout, writer = _write_request(parallelism, partition)
            return plan_write(key, *tensor_parts(tensor), layout, writer)

        return self._store_planned(key, plan, config, upsert)

    def _write_from(
        self,
        key: str,
        pointer: int,
        size: int,
        parallelism: Any,
        config: ReplicateConfig | None,
        partition: Any,
        upsert: bool,
    ) -> int:
        def plan() -> list[tuple[str, Parts]]:
            layout, writer = _write_request(parallelism, partition)
            header, data = self._object_at(pointer, size)
            if layout is not None and layout.tp is not None:
                return plan_write_all(key, header, data, layout)
            return plan_write(key, header, data, layout, writer)

        return self._store_planned(key, plan, config, upsert)

    def _store_planned(
        self, key: str, plan: Callable[[], list[tuple[str, Parts]]], config: ReplicateConfig | None, upsert: bool
    ) -> int:
        """Store the objects of a plan with one call. Return 0 or the first error."""
        config = config or ReplicateConfig()
        planned = self._or_none("put", key, plan)
        if not planned or self._refuse(config, 1):
            return ErrorCode.INVALID_PARAMS
        groups = None if config.group_ids is None else config.group_ids * len(planned)
        names, parts = [name for name, _ in planned], [part for _, part in planned]
        results = self._write_parts(names, parts, replace(config, group_ids=groups), upsert)
        return next((code for code in results if code != ErrorCode.OK), ErrorCode.OK)

    def _write_each(
        self,
        keys: Sequence[str],
        values: Sequence[Sequence[Any]],
        parallelisms: Any,
        config: ReplicateConfig | None,
        partitions: Any,
        write: Callable[..., int],
    ) -> list[int]:
        """Write each key by its own request. All results are -600 when the lists do not belong together."""
        config = config or ReplicateConfig()
        lists = [each for each in (parallelisms, partitions) if each is not None]
        if (
            len(lists) > 1
            or any(not isinstance(each, list) for each in lists)
            or any(len(each) != len(keys) for each in (*lists, *values))
            or self._refuse(config, len(keys))
        ):
            return [ErrorCode.INVALID_PARAMS] * len(keys)
        results = []
        for at, key in enumerate(keys):
            groups = None if config.group_ids is None else [config.group_ids[at]]
            layout, partition = (None if each is None else each[at] for each in (parallelisms, partitions))
            own = (each[at] for each in values)
            results.append(write(key, *own, layout, replace(config, group_ids=groups), partition))
        return results

    # reading

    def _find(self, key: str, target: Any) -> TensorAssembly | None:
        """Fetch what a ReadTarget asks for. None when it is not there; InvalidInput when it does not fit."""
        mode, layout = parse_target(target)
        if layout is None:
            if mode == "shard":
                raise InvalidInput("a read of a part needs axes")
            return (self._join_writers(key) if mode == "full" else None) or self._whole(self.get_batch([key])[0])
        if mode == "as_stored":
            raise InvalidInput("a read of a whole object takes no axes")
        return self._find_shard(key, layout) if mode == "shard" else self._find_full(key, layout)

    def _find_shard(self, key: str, layout: Layout) -> TensorAssembly | None:
        tp = layout.tp
        names = [layout.key(key), manifest_key(key)]
        if layout.is_plain_tp and tp is not None and tp.split_dim is not None:
            names.insert(1, WriterPartition(tp.rank, tp.size, tp.split_dim).key(key))
        *stored, manifest = self.get_batch(names)
        for value in stored:
            found = self._whole(value)
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
        return self._join(target, cut, wanted.span(tp.rank), lambda rank: self._place(key, layout, rank, cut.count))

    def _find_full(self, key: str, layout: Layout) -> TensorAssembly | None:
        if layout.tp is None:
            raise InvalidInput("only the parts of a TP axis can be joined")
        source = self._cut_of(key, layout, self.get_batch([manifest_key(key)])[0])
        if source is None:
            return None
        header, cut = source
        whole = range(cut.shape[cut.dim])
        return self._join(header, cut, whole, lambda rank: self._place(key, layout, rank, cut.count))

    def _join_writers(self, key: str) -> TensorAssembly | None:
        """Return the tensor that several writers stored; None when there is no such tensor."""
        value = self.get_batch([writer_manifest_key(key)])[0]
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
            first = self._whole(self.get_batch([layout.of_rank(0, tp.size).key(key)])[0])
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
        for rank, (name, layout), value in zip(
            ranks, places, self.get_batch([name for name, _ in places]), strict=True
        ):
            found = self._whole(value)
            if found is None:
                return None
            part = found.header
            if not layout.is_of(part) or (part.element_type, part.local_shape) != (header.element_type, cut.part_shape):
                raise InvalidInput(f"{name} is not part {rank} of {cut.count} of the tensor")
            parts.append((rank, found.parts[0][1]))
        return TensorAssembly(header, parts, cut, span)

    def _place(self, key: str, layout: Layout, rank: int, count: int) -> tuple[str, Layout]:
        part = layout.of_rank(rank, count)
        return part.key(key), part

    def _whole(self, value: bytes) -> TensorAssembly | None:
        """Return a stored object as it is; None for a miss. InvalidInput when the object holds no tensor."""
        if not value:
            return None
        header = unpack_header(value)
        data = memoryview(value)[header.data_offset :]
        return TensorAssembly(replace(header, data_offset=HEADER_NBYTES), [(0, data)])

    def _unmarked_part(self, key: str, target: Any) -> torch.Tensor | None:
        """Return the object under the key of a TP part, whatever its header says."""
        try:
            mode, layout = parse_target(target)
        except InvalidInput:
            return None
        if mode != "shard" or layout is None or layout.tp is None or not layout.is_plain_tp:
            return None
        return self.get_tensor(tp_key(key, layout.tp.rank, layout.tp.size))


def _write_request(parallelism: Any, partition: Any) -> tuple[Layout | None, WriterPartition | None]:
    if parallelism is not None and partition is not None:
        raise InvalidInput("a write takes parallelism or writer_partition, not both")
    return (
        None if parallelism is None else parse_layout(parallelism),
        None if partition is None else parse_partition(partition),
    )
