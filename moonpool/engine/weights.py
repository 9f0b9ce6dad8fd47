"""Loads a model's weights in the engine's own layout: projections that read the same input fused into one.

On the CPU they are prepared once per (weight digest, dtype) into the cache folder as one safetensors file, which
every worker maps: four workers on a machine share its pages. Preparing is locked, atomic, and repeated when the
prepared file is found damaged. For a GPU they go straight to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moonpool.base.errors import ModelError, NoSpace
from moonpool.engine.cache_folder import cache_folder, locked, written_whole
from moonpool.engine.config import Device, DType, ModelConfig
from moonpool.engine.model_files import ModelFiles
from moonpool.engine.model_identity import weights_digest
from moonpool.engine.models.llama import LayerWeights, LlamaWeights
from moonpool.engine.weight_sources import WeightSource, open_source

_LAYOUT_VERSION = 1

# Each tensor of a layer and what it is made of, one below the other.
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

# Told how many tensors are prepared, and of how many.
Progress = Callable[[int, int], None]


def load_weights(
    files: ModelFiles,
    config: ModelConfig,
    *,
    dtype: DType = "float32",
    device: Device = "cpu",
    progress: Progress | None = None,
) -> LlamaWeights:
    """The weights, mapped (CPU) or on the device. On the CPU they must not be written to."""
    if device == "cpu":
        return _assemble(config, _mapped(files, config, dtype, progress))
    try:
        with open_source(files, config) as source:
            fused = _fused(source, config, dtype, progress)
            return _assemble(config, {name: tensor.to(device) for name, tensor in fused})
    except torch.OutOfMemoryError as error:
        raise NoSpace(f"the weights of {files.name} do not fit on the device") from error


def random_weights(config: ModelConfig, *, dtype: DType, device: Device, seed: int = 0) -> LlamaWeights:
    """Weights of the right shapes and of sane size, for runs where only speed and bytes matter."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm"):
            return torch.ones(shape, dtype=_torch_dtype(dtype), device=device)
        values = torch.empty(shape, dtype=_torch_dtype(dtype), device=device)
        return values.normal_(0.0, shape[-1] ** -0.5, generator=generator)

    return _assemble(config, {name: tensor(name, shape) for name, shape in tensor_shapes(config).items()})


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors in the engine's layout."""
    hidden, qkv = config.hidden_size, config.query_size + 2 * config.kv_size
    layer: dict[str, tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "qkv": (qkv, hidden),
        "output": (hidden, config.query_size),
        "mlp_norm": (hidden,),
        "gate_up": (2 * config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
    }
    if config.qkv_bias:
        layer["qkv_bias"] = (qkv,)
    if config.output_bias:
        layer["output_bias"] = (hidden,)
    if config.qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, hidden), "norm": (hidden,)}
    if not config.tied_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


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
    """All tensors in the engine's layout, one at a time."""
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
    """Tensors that lie in the file's own pages, mapped privately; None when the file is missing or damaged."""
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
