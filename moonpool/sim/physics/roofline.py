"""Costs of any model on any node, from operations and bytes. Pure.

The time of a step is a sum: operations at a share of the peak; weights and KV read at a share of the memory's peak; two
all-reduces per layer at the measured rate of the GPUs' links (tensor parallel over the node). It is a sum, not the
maximum as in a textbook roofline: kernels fill and drain, so reading does not hide behind computing. Only the sum makes
short prefills as slow as measured. The cached prefix is read from host memory at the measured rate.

The two shares are the only fitted constants, chosen once by eye for LLaMA3-70B on 8 x A800 (Fig 14). With them its ten
prefill and five decode times are within 13 % (tests), if a cached prefix counts in whole blocks of 256 tokens. Counted
to the token, the shortest cached prefill (8k, 95 %) is 22 % too fast and the others are within 15 %. The share of the
memory's peak is low because it includes kernel launches. No other model or GPU was compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.base.errors import InvalidInput
from moonpool.sim.physics.cost import DecodeCost, EngineCost, PrefillCost
from moonpool.sim.physics.hardware import NodeSpec
from moonpool.sim.physics.model_shape import ModelShape

_ALL_REDUCES_PER_LAYER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The shares of the peak rates that are reached."""

    compute: float = 0.65
    memory: float = 0.40

    def __post_init__(self) -> None:
        if not (0 < self.compute <= 1 and 0 < self.memory <= 1):
            raise InvalidInput(f"efficiencies must be above 0 and at most 1, not {self.compute} and {self.memory}")


def roofline_cost(shape: ModelShape, node: NodeSpec, efficiency: Efficiency | None = None) -> EngineCost:
    """Return the step times of this model on this node, all its GPUs together."""
    machine = _Machine(shape, node, efficiency or Efficiency())
    return EngineCost(prefill=machine.prefill(), decode=machine.decode())


_USABLE_SHARE = 0.9  # of GPU memory; vLLM's default


def kv_capacity_tokens(shape: ModelShape, node: NodeSpec) -> int:
    """Return the KV tokens that fit into GPU memory next to the weights. Raise InvalidInput if the weights alone do not
    fit."""
    free = node.hbm_nbytes * _USABLE_SHARE - shape.weights_nbytes
    if free < shape.kv_nbytes_per_token:
        raise InvalidInput(f"{shape.name} does not fit into {node.num_gpus} x {node.gpu.name}", param="gpu")
    return int(free // (shape.kv_nbytes_per_token * _kv_copies(shape, node)))


@dataclass(frozen=True, slots=True)
class _Machine:
    shape: ModelShape
    node: NodeSpec
    efficiency: Efficiency

    def prefill(self) -> PrefillCost:
        shape = self.shape
        pair_s = self._flops_s(shape.pair_flops_per_layer)
        # Causal pairs are (n^2 - p^2 + n - p) / 2.
        per_square_s = pair_s * (shape.num_layers - shape.num_window_layers) / 2
        head_s = self._flops_s(2 * shape.vocab_size * shape.hidden_size)
        return PrefillCost(
            base_s=self._pass_s() + self._weights_s(shape.num_routed_params) + head_s,
            per_token_s=self._token_s(shape.num_layer_params) + per_square_s,
            per_square_s=per_square_s,
            per_prefix_s=shape.kv_nbytes_per_token / self.node.h2d_bandwidth,
            window=shape.window or 0,
            per_window_pair_s=pair_s * shape.num_window_layers,
        )

    def decode(self) -> DecodeCost:
        shape = self.shape
        kv_nbytes = shape.kv_nbytes_per_token_layer * _kv_copies(shape, self.node)
        kv_token_s = self._read_s(kv_nbytes) + self._flops_s(shape.decode_pair_flops_per_layer)
        moe = shape.moe
        return DecodeCost(
            base_s=self._pass_s(),
            per_seq_s=self._token_s(shape.num_active_params),
            per_kv_token_s=kv_token_s * (shape.num_layers - shape.num_window_layers),
            window=shape.window or 0,
            per_window_token_s=kv_token_s * shape.num_window_layers,
            experts_s=self._weights_s(shape.num_routed_params),
            expert_idle_share=1.0 if moe is None else 1 - moe.num_active / moe.num_experts,
        )

    def _pass_s(self) -> float:
        """Return the fixed time of one pass through the model: the weights that all tokens share, and latencies."""
        shape = self.shape
        looked_up = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
        latency_s = self.node.peer_latency_s * self._num_all_reduces()
        return self._weights_s(shape.num_params - looked_up - shape.num_routed_params) + latency_s

    def _token_s(self, num_params: int) -> float:
        """Return the time per token of a step: multiplications, all-reduces (a ring sends each byte almost twice)."""
        gpus = self.node.num_gpus
        sent = self.shape.hidden_size * self.shape.dtype_nbytes * 2 * (gpus - 1) / gpus
        return self._flops_s(2 * num_params) + self._num_all_reduces() * sent / self.node.peer_bandwidth

    def _num_all_reduces(self) -> int:
        return _ALL_REDUCES_PER_LAYER * self.shape.num_layers if self.node.num_gpus > 1 else 0

    def _weights_s(self, num_params: int) -> float:
        return self._read_s(num_params * self.shape.weight_nbytes)

    def _flops_s(self, flops: float) -> float:
        return flops / (self.node.flops * self.efficiency.compute)

    def _read_s(self, nbytes: float) -> float:
        return nbytes / (self.node.hbm_bandwidth * self.efficiency.memory)


def _kv_copies(shape: ModelShape, node: NodeSpec) -> float:
    """Return the number of copies of each KV head: with more GPUs than KV heads, several GPUs hold the same head.

    An MLA latent counts once: such models are served with whole sequences per GPU.
    """
    return 1.0 if shape.mla is not None else max(1.0, node.num_gpus / shape.num_kv_heads)
