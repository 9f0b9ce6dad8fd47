"""Reads a model's weights tensor by tensor under their Hugging Face names, from safetensors or from GGUF."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from moonpool.base.errors import ModelError
from moonpool.engine.config import ModelConfig
from moonpool.engine.gguf_file import GgufFile
from moonpool.engine.model_files import ModelFiles

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


class WeightSource(Protocol):
    def read(self, name: str) -> torch.Tensor:
        """A tensor on the CPU, in the precision it is stored in; ModelError when it is missing."""


@contextlib.contextmanager
def open_source(files: ModelFiles, config: ModelConfig) -> Iterator[WeightSource]:
    """The files' tensors; they stay open as long as the context."""
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
    """GGUF stores the rows of Llama's q and k in pairs (0, half), (1, half + 1), ...; here they come in order."""

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
