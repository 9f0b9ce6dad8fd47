"""`WholeTensorCalls`: whole torch tensors and equal parts of them, under upstream's names.

A tensor is an object of the pool: upstream's header (tensor_format.py) and the elements. The `_with_tp` calls store
each part of a tensor under `KEY_tp_RANK`. Reads return None for what is missing or no tensor; writes return 0 or an
error, -600 for a value that is no tensor. Pointers must lead to registered memory that holds header and elements.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.codes import ErrorCode
from moonpool.integrations.mooncake.parallel_layout import tp_key
from moonpool.integrations.mooncake.pointers import PointerCalls
from moonpool.integrations.mooncake.tensor_format import TensorHeader, unpack_header
from moonpool.integrations.mooncake.tensor_memory import (
    describe,
    tensor_copy,
    tensor_in,
    tensor_parts,
    torch_module,
)
from moonpool.integrations.mooncake.tensor_slicing import Parts, object_parts, tp_shards
from moonpool.integrations.mooncake.types import ReplicateConfig
from moonpool.integrations.mooncake.values import ValueCalls

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class WholeTensorCalls(ValueCalls, PointerCalls):
    """Tensors by key. Results of a batch are by position."""

    # whole tensors

    def put_tensor(self, key: str, tensor: Any) -> int:
        """Store a tensor. Return 0 also when the key is taken: the old value stays."""
        return self._write_tensors([key], [tensor], ReplicateConfig(), False)[0]

    def pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        """put_tensor() with options."""
        return self._write_tensors([key], [tensor], config, False)[0]

    def upsert_tensor(self, key: str, tensor: Any) -> int:
        """Store a tensor in place of what is stored under the key."""
        return self._write_tensors([key], [tensor], ReplicateConfig(), True)[0]

    def upsert_pub_tensor(self, key: str, tensor: Any, config: ReplicateConfig | None = None) -> int:
        return self._write_tensors([key], [tensor], config, True)[0]

    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        return self._write_tensors(keys, tensors_list, ReplicateConfig(), False)

    def batch_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: ReplicateConfig | None = None
    ) -> list[int]:
        return self._write_tensors(keys, tensors_list, config, False)

    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        return self._write_tensors(keys, tensors_list, ReplicateConfig(), True)

    def batch_upsert_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: ReplicateConfig | None = None
    ) -> list[int]:
        return self._write_tensors(keys, tensors_list, config, True)

    def get_tensor(self, key: str) -> torch.Tensor | None:
        return self.batch_get_tensor([key])[0]

    def batch_get_tensor(self, keys: Sequence[str]) -> list[torch.Tensor | None]:
        """Return tensors in main memory, each in memory of its own."""
        return [
            self._or_none("get_tensor", key, tensor_copy, value) if value else None
            for key, value in zip(keys, self.get_batch(keys), strict=True)
        ]

    # tensors in the caller's own memory: header and elements

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Store the tensor object in this registered memory."""
        return self.batch_put_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_put_tensor_from(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Store tensor objects. All results are -600 when one of them is no tensor object."""
        if not self._hold_tensors("batch_put_tensor_from", keys, buffer_ptrs, sizes):
            return [ErrorCode.INVALID_PARAMS] * len(keys)
        return self.batch_put_from(keys, buffer_ptrs, sizes, ReplicateConfig())

    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_upsert_tensor_from([key], [buffer_ptr], [size])[0]

    def batch_upsert_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """batch_put_tensor_from() in place of what is stored under the keys."""
        if not self._hold_tensors("batch_upsert_tensor_from", keys, buffer_ptrs, sizes):
            return [ErrorCode.INVALID_PARAMS] * len(keys)
        return self.batch_upsert_from(keys, buffer_ptrs, sizes, ReplicateConfig())

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> torch.Tensor | None:
        """Read a tensor object into registered memory. Return the tensor over that memory; None for an error."""
        nbytes = self.get_into(key, buffer_ptr, size) if buffer_ptr else ErrorCode.INVALID_PARAMS
        return self._tensor_at(key, buffer_ptr, nbytes)

    def batch_get_tensor_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[Any]:
        """get_tensor_into() of each. All results are -600 when the lists differ in length or a pointer is 0."""
        if self._session is None or not len(keys) == len(buffer_ptrs) == len(sizes) or not all(buffer_ptrs):
            return [ErrorCode.INVALID_PARAMS] * len(keys)
        lengths = self.batch_get_into(keys, buffer_ptrs, sizes)
        return [self._tensor_at(*each) for each in zip(keys, buffer_ptrs, lengths, strict=True)]

    def get_tensor_into_cuda(self, key: str, tensor: Any) -> int:
        """Read a tensor into a contiguous GPU tensor of its type and shape. Return the size of its elements, or -600:
        without a GPU, when the types or shapes differ, or when there is no tensor under the key.
        """
        return self.batch_get_tensor_into_cuda([key], [tensor])[0]

    def batch_get_tensor_into_cuda(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> list[int]:
        """get_tensor_into_cuda() of each. The elements pass through page-locked memory."""
        if len(keys) != len(tensors_list):
            return [ErrorCode.INVALID_PARAMS] * len(keys)
        values = self.get_batch(keys)
        return [self._fill_cuda(*each) for each in zip(keys, tensors_list, values, strict=True)]

    # equal parts of tensors, by rank

    def put_tensor_with_tp(self, key: str, tensor: Any, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0) -> int:
        """Cut a tensor into `tp_size` equal parts along `split_dim` and store all of them, whatever `tp_rank` is.
        -600 when the parts would not be equal.
        """
        return self.pub_tensor_with_tp(key, tensor, ReplicateConfig(), tp_rank, tp_size, split_dim)

    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: Any,
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        """put_tensor_with_tp() with options. A group id per part, if groups are given."""
        config = config or ReplicateConfig()
        if tp_size <= 1:
            return self.pub_tensor(key, tensor, config)
        shards = self._or_none("put", key, _cut_tensor, tensor, tp_size, split_dim)
        if shards is None or self._refuse(config):
            return ErrorCode.INVALID_PARAMS
        results = self._write_parts([tp_key(key, rank) for rank in range(tp_size)], shards, config, False)
        return _first_error(results)

    def batch_put_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Any],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        return self.batch_pub_tensor_with_tp(base_keys, tensors_list, ReplicateConfig(), tp_rank, tp_size, split_dim)

    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Any],
        config: ReplicateConfig | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """put_tensor_with_tp() of each, with one call to the pool. All parts of a tensor are in its group."""
        config = config or ReplicateConfig()
        if tp_size <= 1:
            return self.batch_pub_tensor(base_keys, tensors_list, config)
        if len(base_keys) != len(tensors_list) or self._refuse(config, len(base_keys)):
            return [ErrorCode.INVALID_PARAMS] * len(base_keys)
        cut = [
            self._or_none("put", key, _cut_tensor, tensor, tp_size, split_dim)
            for key, tensor in zip(base_keys, tensors_list, strict=True)
        ]
        return self._write_tp(base_keys, cut, config, tp_size)

    def get_tensor_with_tp(
        self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> torch.Tensor | None:
        """Return the part of one rank, as it was stored; the whole tensor when `tp_size` is 1."""
        return self.get_tensor(tp_key(key, tp_rank, tp_size))

    def batch_get_tensor_with_tp(
        self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1
    ) -> list[torch.Tensor | None]:
        return self.batch_get_tensor([tp_key(key, tp_rank, tp_size) for key in base_keys])

    def get_tensor_with_tp_into(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> torch.Tensor | None:
        return self.get_tensor_into(tp_key(key, tp_rank, tp_size), buffer_ptr, size)

    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list[Any]:
        """batch_get_tensor_into() of the parts of one rank. None by position before setup()."""
        if self._session is None:
            return [None] * len(base_keys)
        return self.batch_get_tensor_into([tp_key(key, tp_rank, tp_size) for key in base_keys], buffer_ptrs, sizes)

    def put_tensor_with_tp_from(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """Cut the whole tensor in this registered memory and store all parts."""
        return self.batch_put_tensor_with_tp_from([key], [buffer_ptr], [size], tp_rank, tp_size, split_dim)[0]

    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        if tp_size <= 1:
            return self.batch_put_tensor_from(base_keys, buffer_ptrs, sizes)
        if not len(base_keys) == len(buffer_ptrs) == len(sizes):
            return [ErrorCode.INVALID_PARAMS] * len(base_keys)

        def cut(pointer: int, size: int) -> list[Parts]:
            return tp_shards(*self._object_at(pointer, size), tp_size, split_dim)

        places = zip(base_keys, buffer_ptrs, sizes, strict=True)
        shards = [self._or_none("put", key, cut, pointer, size) for key, pointer, size in places]
        return self._write_tp(base_keys, shards, ReplicateConfig(), tp_size)

    # what the calls have in common; parallel_tensors.py uses it too

    def _write_tensors(
        self, keys: Sequence[str], tensors: Sequence[Any], config: ReplicateConfig | None, upsert: bool
    ) -> list[int]:
        config = config or ReplicateConfig()
        if len(keys) != len(tensors) or self._refuse(config):
            return [ErrorCode.INVALID_PARAMS] * len(keys)
        values = [
            self._or_none("put", key, _whole_tensor, tensor) or [] for key, tensor in zip(keys, tensors, strict=True)
        ]
        return self._write_parts(keys, values, config, upsert)

    def _write_parts(
        self, keys: Sequence[str], values: Sequence[Parts], config: ReplicateConfig, upsert: bool
    ) -> list[int]:
        """Store objects that are given as pieces, with one call. [] stands for a value that is refused."""
        return self._put(keys, values, config, replace=upsert)

    def _write_tp(
        self, keys: Sequence[str], cut: Sequence[list[Parts] | None], config: ReplicateConfig, tp_size: int
    ) -> list[int]:
        """Store the parts of tensors that were cut with one call. Return 0 or the first error for each tensor."""
        groups = None if config.group_ids is None else [each for each in config.group_ids for _ in range(tp_size)]
        names = [tp_key(key, rank) for key in keys for rank in range(tp_size)]
        parts = [part for shards in cut for part in (shards or [[]] * tp_size)]
        results = self._write_parts(names, parts, replace(config, group_ids=groups), False)
        return [_first_error(results[at : at + tp_size]) for at in range(0, len(results), tp_size)]

    def _refuse(self, config: ReplicateConfig, num_groups: int | None = None) -> bool:
        """Return whether tensors must not be written with these options, or not before setup()."""
        segments = config.preferred_segments
        if self._session is None or (segments and len(segments) != config.replica_num):
            return True
        return num_groups is not None and config.group_ids is not None and len(config.group_ids) != num_groups

    def _object_at(self, pointer: int, size: int) -> tuple[TensorHeader, memoryview]:
        """Return header and elements of the tensor object in registered memory. InvalidInput when there is none."""
        memory = self._memory.view(pointer, size)
        header = unpack_header(memory)
        return header, memory[header.data_offset :]

    def _hold_tensors(self, what: str, keys: Sequence[str], pointers: Sequence[int], sizes: Sequence[int]) -> bool:
        """Return whether each pointer leads to a tensor object of its size."""
        if not len(keys) == len(pointers) == len(sizes):
            return False
        places = zip(keys, pointers, sizes, strict=True)
        return all(self._or_none(what, key, self._object_at, pointer, size) for key, pointer, size in places)

    def _tensor_at(self, key: str, pointer: int, nbytes: int) -> torch.Tensor | None:
        """Return the tensor that a read of `nbytes` (or an error) left in registered memory."""
        if nbytes <= 0:
            return None
        return self._or_none("get", key, lambda: tensor_in(self._memory.view(pointer, nbytes)))

    def _fill_cuda(self, key: str, tensor: Any, value: bytes) -> int:
        def fill() -> int:
            stored, wanted = unpack_header(value), describe(tensor)
            if tensor.device.type != "cuda" or not tensor.is_contiguous():
                raise InvalidInput("the target is no contiguous tensor of a GPU")
            if (stored.element_type, stored.local_shape) != (wanted.element_type, wanted.local_shape):
                raise InvalidInput(f"the target is {wanted.type_name} {wanted.local_shape}, unlike the stored tensor")
            staged = torch_module().empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            staged.copy_(tensor_copy(value))
            tensor.copy_(staged)  # returns when the elements are on the GPU
            return stored.data_nbytes

        filled = self._or_none("get_tensor_into_cuda", key, fill)
        return ErrorCode.INVALID_PARAMS if filled is None else filled

    def _or_none(self, what: str, key: str, action: Callable[..., T], *args: Any) -> T | None:
        """Return the action's result. Log what makes the caller's input or a stored value useless, and return None."""
        try:
            return action(*args)
        except InvalidInput as error:
            _LOG.warning("%s %s: %s", what, key, error)
            return None


def _whole_tensor(tensor: Any) -> Parts:
    return object_parts(*tensor_parts(tensor))


def _cut_tensor(tensor: Any, tp_size: int, split_dim: int) -> list[Parts]:
    return tp_shards(*tensor_parts(tensor), tp_size, split_dim)


def _first_error(results: Sequence[int]) -> int:
    return next((code for code in results if code != ErrorCode.OK), ErrorCode.OK)
