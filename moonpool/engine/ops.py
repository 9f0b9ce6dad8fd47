"""The operations of a layer that differ between devices, behind one interface, and their plain torch form.

The torch form serves the CPU, and the tests compare the GPU's kernels (cuda_ops.py) with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from moonpool.engine.attention import AttentionGroup, QuerySpan, attend, plan_attention
from moonpool.engine.config import ModelConfig
from moonpool.engine.kv_tensor import KvMemory, Rows

CosSin = tuple[torch.Tensor, torch.Tensor]
QkNorms = tuple[torch.Tensor, torch.Tensor]  # weights of the norms of queries and keys


class AttentionPlan(Protocol):
    """The attention of one step: which rows belong to one sequence, and its pages. The same for all layers."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the attention of query [rows, heads, dim] over the pages, which hold the step's own KV already:
        [rows, heads * dim]. `key` and `value` are the step's own, [rows, kv heads, dim].
        """


class LayerOps(Protocol):
    """For one model and one KV memory."""

    reads_whole_pages: bool  # attention also multiplies what lies behind a sequence's end, by 0

    def index(self, *values: np.ndarray) -> list[torch.Tensor]:
        """Return these indices on the device."""

    def write_index(self, pages: Rows, slots: Rows) -> np.ndarray:
        """Return where the KV of tokens goes, in the form that `rotate_and_write` takes."""

    def plan(self, spans: Sequence[QuerySpan], num_rows: int) -> AttentionPlan:
        """Return the attention of a step with `num_rows` rows."""

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x + delta, which may be x itself, and its RMS norm."""

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x [rows, in] times weight [out, in] transposed, plus bias."""

    def rotate_and_write(
        self, qkv: torch.Tensor, norms: QkNorms | None, cos_sin: CosSin, write_index: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normalize queries and keys if the model does, rotate them, and write keys and values to their pages.
        Return queries, keys and values, each [rows, its heads, dim].
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up of [rows, gate | up]."""


class TorchOps:
    """LayerOps in plain torch."""

    reads_whole_pages = True

    def __init__(self, config: ModelConfig, kv: KvMemory) -> None:
        self._config, self._kv = config, kv

    def index(self, *values: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(each).to(self._kv.tensor.device) for each in values]

    def write_index(self, pages: Rows, slots: Rows) -> np.ndarray:
        return self._kv.token_index(pages, slots)

    def plan(self, spans: Sequence[QuerySpan], num_rows: int) -> AttentionPlan:
        kv = self._kv
        groups = plan_attention(spans, kv, num_rows=num_rows, dtype=kv.tensor.dtype, device=kv.tensor.device)
        return _GroupedAttention(groups, kv)

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x if delta is None else x + delta
        return x, self._norm(x, weight)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def rotate_and_write(
        self, qkv: torch.Tensor, norms: QkNorms | None, cos_sin: CosSin, write_index: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self._config
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)
        num_turned = config.num_heads + config.num_kv_heads
        qk, v = heads[:, :num_turned], heads[:, num_turned:]
        if norms is not None:
            q, k = qk[:, : config.num_heads], qk[:, config.num_heads :]
            qk = torch.cat((self._norm(q, norms[0]), self._norm(k, norms[1])), dim=1)
        qk = rotate(qk, *cos_sin)
        q, k = qk[:, : config.num_heads], qk[:, config.num_heads :]
        self._kv.write(layer, write_index, k, v)
        return q, k, v

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)


class _GroupedAttention:
    def __init__(self, groups: Sequence[AttentionGroup], kv: KvMemory) -> None:
        self._groups, self._kv = groups, kv

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
        return attend(query, self._groups, self._kv, layer)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x [tokens, heads, head_dim] rotated, as a new contiguous tensor."""
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=turned[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned[..., half:]).addcmul_(first, sin)
    return turned
