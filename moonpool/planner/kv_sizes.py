"""The size of a model's KV, and the link bandwidth above which fetching it is faster than computing it. Pure.

The threshold is given in three ways, for prefixes of each length that one more token follows: the paper's eq. 2 as
printed (its 4 and 22 operations are those of a dense LLaMA; None for a mixture of experts or latent attention), eq. 2
with the model's own operations, and by the cost model, which includes that peaks are not reached.
"""

from __future__ import annotations

import msgspec

from moonpool.conductor.crossover import break_even_bandwidth
from moonpool.sim.fleet import Machine
from moonpool.sim.physics.model_shape import ModelShape

_K = 1024
PROMPT_TOKENS = (1 * _K, 2 * _K, 4 * _K, 8 * _K, 16 * _K, 32 * _K, 64 * _K, 128 * _K)
_TB = 1e12


class Threshold(msgspec.Struct, frozen=True, kw_only=True):
    """Rates in bytes/s above which a prefix of `num_tokens` is worth fetching."""

    num_tokens: int
    kv_nbytes: int
    prefill_s: float  # computing all of it
    paper_nbytes_s: float | None
    peak_nbytes_s: float
    cost_nbytes_s: float


class KvSizes(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    gpu: str
    num_gpus: int
    kv_nbytes_per_token: int
    tokens_per_tb: float
    network_nbytes_s: float  # measured rate of all NICs of the node
    thresholds: list[Threshold]


def kv_sizes(machine: Machine, lengths: tuple[int, ...] = PROMPT_TOKENS) -> KvSizes:
    shape, node = machine.shape, machine.node
    return KvSizes(
        model=shape.name,
        gpu=node.gpu.name,
        num_gpus=node.num_gpus,
        kv_nbytes_per_token=shape.kv_nbytes_per_token,
        tokens_per_tb=_TB / shape.kv_nbytes_per_token,
        network_nbytes_s=node.network_bandwidth,
        thresholds=[_threshold(machine, num_tokens) for num_tokens in lengths],
    )


def _threshold(machine: Machine, num_tokens: int) -> Threshold:
    shape, prefill = machine.shape, machine.cost.prefill
    kv_nbytes = num_tokens * shape.kv_nbytes_per_token
    saved_s = prefill.compute_s(num_tokens + 1, 0) - prefill.compute_s(num_tokens + 1, num_tokens)
    like_llama = shape.moe is None and shape.mla is None
    attention_ops = shape.pair_flops_per_layer / shape.hidden_size
    dense_ops = 2 * shape.num_layer_params / shape.num_layers / shape.hidden_size**2
    return Threshold(
        num_tokens=num_tokens,
        kv_nbytes=kv_nbytes,
        prefill_s=prefill.compute_s(num_tokens),
        paper_nbytes_s=_eq2(machine, num_tokens) if like_llama else None,
        peak_nbytes_s=_eq2(machine, num_tokens, attention_ops=attention_ops, dense_ops=dense_ops),
        cost_nbytes_s=kv_nbytes / saved_s,
    )


def _eq2(machine: Machine, num_tokens: int, **ops: float) -> float:
    shape = machine.shape
    return break_even_bandwidth(
        machine.node.flops,
        num_tokens,
        width=shape.hidden_size,
        gqa=_gqa(shape),
        element_nbytes=shape.dtype_nbytes,
        **ops,
    )


def _gqa(shape: ModelShape) -> float:
    """Return by which factor the KV is smaller than 2 d elements per token and layer: heads per KV head, if the heads
    together are as wide as the model, and the equivalent for other models."""
    return 2 * shape.hidden_size * shape.dtype_nbytes / shape.kv_nbytes_per_token_layer
