"""torch tensors as a header and bytes, and back. torch is imported when a tensor is touched, not before.

The bytes of a contiguous tensor in main memory are its own memory. A tensor on a GPU is copied to page-locked memory.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool.base.errors import InvalidInput
from moonpool.integrations.mooncake.tensor_format import (
    ELEMENT_NUMBERS,
    HEADER_NBYTES,
    MAX_DIMENSIONS,
    TensorHeader,
    unpack_header,
)
from moonpool.transfer.memory.buffers import as_bytes_view, copy_bytes

if TYPE_CHECKING:
    import torch


def describe(tensor: Any) -> TensorHeader:
    """Return the header of a whole tensor. InvalidInput when it is no tensor, or one that the format cannot hold."""
    if not hasattr(tensor, "data_ptr") or not str(getattr(tensor, "dtype", "")).startswith("torch."):
        raise InvalidInput(f"{type(tensor).__name__} is no torch tensor")
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ELEMENT_NUMBERS:
        raise InvalidInput(f"tensors of {name} cannot be stored")
    if tensor.dim() > MAX_DIMENSIONS:
        raise InvalidInput(f"a tensor has at most {MAX_DIMENSIONS} dimensions, not {tensor.dim()}")
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized:
        raise InvalidInput(f"a tensor with layout {tensor.layout} has no plain elements")
    shape = tuple(tensor.shape)
    return TensorHeader(ELEMENT_NUMBERS[name], shape, shape)


def in_main_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, contiguous and in main memory: itself, or a copy."""
    plain = tensor.detach().resolve_neg().contiguous()
    if plain.device.type == "cpu":
        return plain
    if plain.device.type != "cuda":
        return plain.cpu()
    staged: torch.Tensor = torch_module().empty(plain.shape, dtype=plain.dtype, pin_memory=True)
    staged.copy_(plain)  # waits for the work that was queued for the tensor
    return staged


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor in main memory; the view keeps it alive."""
    return as_bytes_view(tensor, writable=False)


def tensor_parts(tensor: Any) -> tuple[TensorHeader, memoryview]:
    """Return what to store for a tensor. InvalidInput as describe()."""
    header = describe(tensor)
    return header, tensor_bytes(in_main_memory(tensor))


def tensor_of(header: TensorHeader, data: memoryview) -> torch.Tensor:
    """Return a tensor over `data`, which must be writable and stay mapped while the tensor is used."""
    if not data.nbytes:
        return new_tensor(header)
    flat: torch.Tensor = torch_module().from_numpy(np.frombuffer(data, np.uint8))
    return flat.view(getattr(torch_module(), header.type_name)).reshape(header.local_shape)


def new_tensor(header: TensorHeader) -> torch.Tensor:
    """Return a tensor in main memory whose elements are still to be written."""
    tensor: torch.Tensor = torch_module().empty(header.local_shape, dtype=getattr(torch_module(), header.type_name))
    return tensor


def tensor_copy(value: memoryview | bytes) -> torch.Tensor:
    """Return the tensor that an object holds, in memory of its own. InvalidInput when the object holds no tensor."""
    view = memoryview(value)
    header = unpack_header(view)
    tensor = new_tensor(header)
    if header.data_nbytes:
        copy_bytes(as_bytes_view(tensor, writable=True), view[header.data_offset :])
    return tensor


def tensor_in(memory: memoryview) -> torch.Tensor:
    """Return the tensor whose object fills `memory`, without a copy. InvalidInput when the memory holds no tensor."""
    header = unpack_header(memory)
    return tensor_of(header, memory[header.data_offset :])


def serialize_tensor(tensor: Any) -> tuple[bytes, int, int, Any]:
    """Return header, address and size of the elements, and the tensor whose memory that is. ValueError when the format
    cannot hold the tensor.
    """
    try:
        header = describe(tensor)
    except InvalidInput as error:
        raise ValueError(f"unsupported tensor for Mooncake tensor serialization: {error}") from error
    owner = tensor.contiguous()
    return header.pack(), owner.data_ptr(), header.data_nbytes, owner


def deserialize_tensor(payload: bytes) -> torch.Tensor:
    """Return the tensor that serialized bytes hold. ValueError when they hold none."""
    try:
        return tensor_copy(payload)
    except InvalidInput as error:
        raise ValueError(f"invalid serialized Mooncake tensor payload: {error}") from error


def tensor_metadata_size() -> int:
    """Return the size of the header."""
    return HEADER_NBYTES


def torch_module() -> Any:
    """Return torch. InvalidInput when it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise InvalidInput("tensors need torch, which is not installed") from error
