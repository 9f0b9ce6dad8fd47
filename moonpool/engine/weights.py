"""Loads a model's weights, from safetensors or GGUF, in the engine's own layout: projections of the same input are
fused.

On the CPU they are prepared once per (weight digest, dtype) into the cache folder as one safetensors file, which every
worker maps: four workers on a machine share its pages. Preparing is locked, atomic, and repeated if the prepared file
is damaged. For a GPU they are copied to the device directly.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moonpool.base.errors import ModelError, NoSpace
from moonpool.engine.cache_folder import cache_folder, locked, written_whole
from moonpool.engine.config import Device, DType, ModelConfig, Shape, tensor_shapes
from moonpool.engine.gguf_file import GgufFile
from moonpool.engine.llama import LayerWeights, LlamaWeights
from moonpool.engine.model_files import RANDOM_SEED, ModelFiles, require_weights, weights_digest

_LAYOUT_VERSION = 1
# Random weights (model_files.py puts a version into the cache identity: a change here is a new version).
_MASK = 2**32 - 1
_HASH_FACTORS = (0x6F4A7C15, 0x5BD1E995, 0x2545F491)
_RANDOM_AT_ONCE = 1 << 24

# Each tensor of a layer and its parts, concatenated by rows.
_LAYER_PARTS: dict[str, tuple[str, ...]] = {
    "attention_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "output": ("self_attn.o_proj.weight",),
    "output_bias": ("self_attn.o_proj.bias",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}
_TOP_PARTS = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}

# Called with (tensors prepared, tensors in total).
Progress = Callable[[int, int], None]


def load_weights(
    files: ModelFiles,
    config: ModelConfig,
    *,
    dtype: DType = "float32",
    device: Device = "cpu",
    progress: Progress | None = None,
) -> LlamaWeights:
    """Return the weights, mapped (CPU) or on the device. On the CPU the caller must not write to them. Random weights
    are generated on the device."""
    if files.random_weights:
        return random_weights(config, dtype=dtype, device=device, seed=RANDOM_SEED, progress=progress)
    require_weights(files)
    if device == "cpu":
        return _assemble(config, _mapped(files, config, dtype, progress))
    try:
        with open_source(files, config) as source:
            fused = _fused(source, config, dtype, progress)
            return _assemble(config, {name: tensor.to(device) for name, tensor in fused})
    except torch.OutOfMemoryError as error:
        raise NoSpace(f"the weights of {files.name} do not fit on {device}") from error


def random_weights(
    config: ModelConfig, *, dtype: DType, device: Device, seed: int = 0, progress: Progress | None = None
) -> LlamaWeights:
    """Return random weights of the right shapes and of usual size, for runs where only speed and bytes matter.

    They follow from the seed, the shapes and the dtype alone: every device and every machine generates the same ones.
    """
    shapes, tensors = tensor_shapes(config), {}
    try:
        for done, (name, shape) in enumerate(shapes.items(), start=1):
            tensors[name] = _random_tensor(name, shape, _torch_dtype(dtype), device, seed)
            if progress is not None:
                progress(done, len(shapes))
    except torch.OutOfMemoryError as error:
        raise NoSpace(f"the random weights do not fit on {device}") from error
    return _assemble(config, tensors)


def _random_tensor(name: str, shape: Shape, dtype: torch.dtype, device: Device, seed: int) -> torch.Tensor:
    """Return ones for a norm, else numbers uniformly distributed with the standard deviation 1 / sqrt(columns)."""
    if name.endswith("norm"):
        return torch.ones(shape, dtype=dtype, device=device)
    made = torch.empty(shape, dtype=dtype, device=device)
    flat, start = made.view(-1), zlib.crc32(f"{seed}/{name}".encode())
    scale = (3 / shape[-1]) ** 0.5 / 2**31
    for first in range(0, flat.numel(), _RANDOM_AT_ONCE):
        part = flat[first : first + _RANDOM_AT_ONCE]
        part.copy_((_hashed(first, part.numel(), start, device) - 2**31).float() * scale)
    return made


def _hashed(first: int, count: int, start: int, device: Device) -> torch.Tensor:
    """Return `count` numbers from 0 to 2**32 - 1, each a hash of its index and `start`.

    Integers, because generators of random numbers give other numbers on other devices. Both factors are below 2**31,
    so no product exceeds 63 bits.
    """
    x = torch.arange(first, first + count, dtype=torch.int64, device=device)
    for factor, mixed_in in zip(_HASH_FACTORS, (start, 0, 0), strict=True):
        x.bitwise_xor_(x >> 16).mul_(factor).bitwise_and_(_MASK).bitwise_xor_(mixed_in)
    return x.bitwise_xor_(x >> 15)


def _assemble(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> LlamaWeights:
    names = [field.name for field in fields(LayerWeights)]
    layers = tuple(
        LayerWeights(**{name: tensors.get(f"layers.{index}.{name}") for name in names})  # type: ignore[arg-type]
        for index in range(config.num_layers)
    )
    embedding = tensors["embedding"]
    return LlamaWeights(embedding=embedding, layers=layers, norm=tensors["norm"], head=tensors.get("head", embedding))


def _fused(
    source: WeightSource, config: ModelConfig, dtype: DType, progress: Progress | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors in the engine's layout, one at a time."""
    shapes = tensor_shapes(config)
    for done, (name, shape) in enumerate(shapes.items(), start=1):
        parts = [source.read(part).to(_torch_dtype(dtype)) for part in _parts(name)]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{' + '.join(_parts(name))} has shape {tuple(tensor.shape)}, expected {shape}")
        yield name, tensor.contiguous()
        if progress is not None:
            progress(done, len(shapes))


def _parts(name: str) -> tuple[str, ...]:
    if name in _TOP_PARTS:
        return (_TOP_PARTS[name],)
    _, index, local = name.split(".")
    return tuple(f"model.layers.{index}.{part}" for part in _LAYER_PARTS[local])


def _mapped(files: ModelFiles, config: ModelConfig, dtype: DType, progress: Progress | None) -> dict[str, torch.Tensor]:
    target = cache_folder("prepared") / f"{weights_digest(files)}-{dtype}-v{_LAYOUT_VERSION}.safetensors"
    with locked(target):
        tensors = _open_prepared(target, config)
        if tensors is None:
            _prepare(target, files, config, dtype, progress)
            tensors = _open_prepared(target, config)
    if tensors is None:
        raise ModelError(f"the prepared weights {target} cannot be read back")
    return tensors


def _prepare(target: Path, files: ModelFiles, config: ModelConfig, dtype: DType, progress: Progress | None) -> None:
    with open_source(files, config) as source, written_whole(target) as partial:
        save_file(dict(_fused(source, config, dtype, progress)), partial)


def _open_prepared(target: Path, config: ModelConfig) -> dict[str, torch.Tensor] | None:
    """Return tensors over a private mapping of the file; None if the file is missing or damaged."""
    try:
        with safe_open(str(target), framework="pt", device="cpu") as reader:
            tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    except (SafetensorError, OSError):
        return None
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return tensors if found == tensor_shapes(config) else None


def _torch_dtype(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype)
    return found


class WeightSource(Protocol):
    """Tensors by their Hugging Face names."""

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU, in its stored precision. Raise ModelError if it is missing."""


@contextlib.contextmanager
def open_source(files: ModelFiles, config: ModelConfig) -> Iterator[WeightSource]:
    """Open the files for reading; the context closes them."""
    if files.kind == "gguf":
        file = GgufFile.open(files.root)
        file.require_whole()
        yield _GgufSource(file, config)
        return
    with contextlib.ExitStack() as stack:
        yield _SafetensorsSource(files, stack)


class _SafetensorsSource:
    def __init__(self, files: ModelFiles, stack: contextlib.ExitStack) -> None:
        self._root = files.root
        self._readers = {}
        for path in files.weights:
            reader = stack.enter_context(_opened(path))
            self._readers.update(dict.fromkeys(reader.keys(), reader))

    def read(self, name: str) -> torch.Tensor:
        reader = self._readers.get(name)
        if reader is None:
            raise ModelError(f"{self._root} lacks the tensor {name}")
        tensor: torch.Tensor = reader.get_tensor(name)
        return tensor


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is truncated or not a safetensors file: {error}") from error


class _GgufSource:
    """GGUF stores the rows of Llama's q and k in pairs (0, half), (1, half + 1), ...; `read` returns them in order."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config

    def read(self, name: str) -> torch.Tensor:
        tensor = torch.from_numpy(self._file.read(_gguf_name(name)))
        if self._config.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            return _unpaired(tensor, self._config.head_dim)
        return tensor


def _gguf_name(name: str) -> str:
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[module]}.{kind}"


def _unpaired(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    paired = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])  # [heads, half, pair, ...]
    return paired.transpose(1, 2).reshape(rows.shape)
