"""Jagged nested tensors of torch as one buffer, and back: the tensor objects of values, offsets and lengths."""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from moonpool.integrations.mooncake.bundle_payloads import GatheredPayload
from moonpool.integrations.mooncake.tensor_memory import deserialize_tensor, tensor_parts, torch_module


def encode_nested(tensor: Any) -> tuple[dict[str, Any], GatheredPayload]:
    """Return the field spec and the buffer. ValueError unless the tensor has the jagged layout."""
    if str(tensor.layout) != "torch.jagged":
        raise ValueError("a nested tensor is stored with the layout torch.jagged only")
    lengths = tensor.lengths()
    sources = [tensor.values(), tensor.offsets()] + ([] if lengths is None else [lengths])
    buffers: list[memoryview] = []
    sizes = []
    for source in sources:
        header, elements = tensor_parts(source)
        buffers += [memoryview(header.pack()), elements]
        sizes.append(header.nbytes)
    spec = {
        "encoding": "torch_tensor",
        "dtype": str(tensor.dtype),
        "nested": True,
        "format": "tensor_parts",
        "part_bytes": sizes,
        "has_lengths": lengths is not None,
        "ragged_idx": int(getattr(tensor, "_ragged_idx", 1)),
    }
    return spec, GatheredPayload(tuple(buffers), tuple(sources))


def decode_nested(spec: Mapping[str, Any], payload: memoryview) -> Any:
    """Return the tensor of a buffer. ValueError when the buffer is not what the spec says."""
    if spec.get("format", "torch_save") == "torch_save":
        return load_saved(payload)
    sizes = spec.get("part_bytes")
    num_parts = 3 if spec.get("has_lengths") else 2
    if spec["format"] != "tensor_parts" or not isinstance(sizes, list) or len(sizes) != num_parts:
        raise ValueError("the spec of a nested tensor names no parts that are known here")
    if not all(type(size) is int and size > 0 for size in sizes) or sum(sizes) != payload.nbytes:
        raise ValueError("the parts of a nested tensor do not make up its buffer")
    parts, at = [], 0
    for size in sizes:
        parts.append(deserialize_tensor(bytes(payload[at : at + size])))
        at += size
    lengths = parts[2] if num_parts == 3 else None
    join = torch_module().nested.nested_tensor_from_jagged
    return join(parts[0], offsets=parts[1], lengths=lengths, jagged_dim=int(spec.get("ragged_idx", 1)))


def take_rows(tensor: Any, rows: Sequence[int]) -> Any:
    """Return a nested tensor of these rows. Rows of one length stay ragged in the same dimension."""
    torch = torch_module()
    ragged = int(getattr(tensor, "_ragged_idx", 1))
    all_rows = tensor.unbind()
    chosen = [all_rows[row] for row in rows]
    values = torch.cat(chosen, dim=ragged - 1) if chosen else tensor.values().narrow(ragged - 1, 0, 0)
    ends = itertools.accumulate((row.shape[ragged - 1] for row in chosen), initial=0)
    offsets = torch.tensor(list(ends), dtype=tensor.offsets().dtype)
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=ragged)


def load_saved(payload: memoryview) -> Any:
    """Return what torch.save() wrote; only tensors and plain values are loaded."""
    return torch_module().load(io.BytesIO(payload), weights_only=True)
