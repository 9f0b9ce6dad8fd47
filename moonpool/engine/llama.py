"""The Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3 are one architecture with a few switches.

Written once for every device, over the operations of ops.py: the tokens of a step, of all its sequences, are rows of
one matrix, so each projection is one matrix product. Only attention knows which rows belong to one sequence.
Rotary positions turn each pair of dimensions (i, i + half) of a head by an angle that grows with the position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from moonpool.engine.config import ModelConfig, RopeScaling
from moonpool.engine.ops import AttentionPlan, LayerOps, QkNorms


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Projections are [out, in]; projections of the same input are fused into one."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None

    @property
    def qk_norms(self) -> QkNorms | None:
        return None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    """All weights, on one device and in one dtype. `head` is `embedding` itself when they are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


class LayerHooks(Protocol):
    """Called on the thread that runs the step."""

    def before_layer(self, layer: int) -> None:
        """Before this layer's KV is read or written; may wait until pulled KV has arrived."""

    def after_layer(self, layer: int) -> None:
        """After this layer's KV of the step is in its pages; the step does not touch it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step's input, on the model's device. Rows are the tokens of all chunks, one after another."""

    tokens: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    write_index: torch.Tensor  # LayerOps.write_index of all rows
    attention: AttentionPlan
    wanted: torch.Tensor | None = None  # rows whose logits are wanted; None: all of them
    wanted_attention: AttentionPlan | None = None  # of the wanted rows alone


class LlamaModel:
    """Weights and configuration; no state between steps."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._frequencies = inverse_frequencies(config, self.device)

    def forward(self, step: Step, ops: LayerOps, hooks: LayerHooks | None = None) -> torch.Tensor:
        """Write the step's KV into its pages; return logits [wanted rows, vocab]."""
        return self._logits(ops, *self._compute(step, ops, hooks, range(self.config.num_layers), self._embed(step)))

    def forward_span(
        self, step: Step, ops: LayerOps, layers: range, hidden: torch.Tensor | None, hooks: LayerHooks | None = None
    ) -> torch.Tensor:
        """Compute some layers of a step, and write their KV: one stage of a pipeline.

        `hidden` is what the layers before them returned; None: `layers` begin with the first. Return the hidden states
        [rows, hidden], after the last layer the logits. The logits are exactly those of forward(): a stage adds what
        its last layer adds, as the next layer would.
        """
        x, delta = self._compute(step, ops, hooks, layers, self._embed(step) if hidden is None else hidden)
        if layers.stop == self.config.num_layers:
            return self._logits(ops, x, delta)
        return x if delta is None else x + delta

    def _embed(self, step: Step) -> torch.Tensor:
        return F.embedding(step.tokens, self.weights.embedding)  # [rows, hidden]

    def _logits(self, ops: LayerOps, x: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        _, normed = ops.add_norm(x, delta, self.weights.norm)
        return ops.linear(normed, self.weights.head)

    def _compute(
        self, step: Step, ops: LayerOps, hooks: LayerHooks | None, layers: range, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return x after these layers, and what the last of them still has to add to it."""
        cos_sin = rotation(self._frequencies, step.positions, self.dtype)
        delta: torch.Tensor | None = None  # what the layer before adds to x
        last = self.config.num_layers - 1
        for index in layers:
            layer = self.weights.layers[index]
            x, normed = ops.add_norm(x, delta, layer.attention_norm)
            qkv = ops.linear(normed, layer.qkv, layer.qkv_bias)
            if hooks is not None:
                hooks.before_layer(index)
            q, k, v = ops.rotate_and_write(qkv, layer.qk_norms, cos_sin, step.write_index, index)
            attention = step.attention
            if index == last and step.wanted is not None and step.wanted_attention is not None:
                # Nothing reads the other rows after the last layer's KV is written.
                x, q = x.index_select(0, step.wanted), q.index_select(0, step.wanted)
                attention = step.wanted_attention
            attended = attention.attend(q, k, v, index)
            if hooks is not None:
                hooks.after_layer(index)
            x, normed = ops.add_norm(x, ops.linear(attended, layer.output, layer.output_bias), layer.mlp_norm)
            delta = ops.linear(ops.silu_mul(ops.linear(normed, layer.gate_up)), layer.down)
        return x, delta


def inverse_frequencies(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """Return radians per position for each pair of dimensions: [head_dim / 2], float32."""
    # float32 and in this order of operations, because that is how the models were trained and are published.
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is not None:
        frequencies = _scaled(frequencies, config.rope_scaling)
    return frequencies.to(device)


def _scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "divisors":
        return frequencies / torch.tensor(scaling.divisors, dtype=torch.float32)
    return _llama3_scaled(frequencies, scaling)


def _llama3_scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Stretch long waves by the factor, keep short ones, blend those between."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = torch.where(turns < scaling.low_freq_factor, frequencies / scaling.factor, frequencies)
    between = (turns >= scaling.low_freq_factor) & (turns <= scaling.high_freq_factor)
    return torch.where(between, blended, stretched)


def rotation(
    frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of a step's tokens, each [tokens, 1, head_dim / 2]; computed once for all layers."""
    angles = positions.float()[:, None] * frequencies
    return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]
