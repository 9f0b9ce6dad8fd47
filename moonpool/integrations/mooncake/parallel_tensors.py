"""`ParallelTensorCalls`: tensors that ranks write in parts, read by other ranks in parts of another size or as a whole.

A write follows a request (parallel_layout.py); a read follows a target (parallel_parts.py). Reads return None for what
is missing or does not fit the request; writes return 0 or an error, -600 for a request that upstream refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.integrations.mooncake.parallel_layout import (
    Layout,
    WriterPartition,
    parse_layout,
    parse_partition,
    parse_target,
    plan_write,
    plan_write_all,
    tp_key,
)
from moonpool.integrations.mooncake.parallel_parts import TensorFinder
from moonpool.integrations.mooncake.tensor_format import HEADER_NBYTES
from moonpool.integrations.mooncake.tensor_memory import new_tensor, tensor_of, tensor_parts
from moonpool.integrations.mooncake.tensor_slicing import Parts
from moonpool.integrations.mooncake.tensors import WholeTensorCalls
from moonpool.integrations.mooncake.types import ReplicateConfig
from moonpool.transfer.memory.buffers import as_bytes_view

if TYPE_CHECKING:
    import torch


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
        found = self._or_none("get", key, TensorFinder(self.get_batch).find, key, target)
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
            found = TensorFinder(self.get_batch).find(key, target)
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
