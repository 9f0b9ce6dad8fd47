"""The shape of a model, as far as bytes and operations depend on it. Pure; any Hugging Face config.json will do.

Counts are exact for the families named in tests (Llama, Mistral, Qwen 2/3, DeepSeek V2/V3 with MLA, Mixtral-like
mixtures, Gemma-like sliding windows). Operations count one multiply-add as two, and causal attention as what it
computes: each token against itself and those before it, or its window of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.base.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Multi-head latent attention: what is cached is one latent and one rotary key for all heads."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """A mixture of experts in all layers but the first `num_dense_layers`."""

    num_experts: int
    num_active: int
    expert_size: int
    shared_size: int = 0  # intermediate size of what every token passes through beside its experts
    num_dense_layers: int = 0
    router_bias: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.num_active <= self.num_experts:
            raise InvalidInput(f"{self.num_active} experts of {self.num_experts} cannot be active")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one decoder-only model."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    dtype_nbytes: int = 2  # of the KV and of what flows between layers
    weight_nbytes: int = 2  # of one weight
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: int = 2
    num_window_layers: int = 0  # layers that attend to the last `window` tokens only
    window: int | None = None
    mla: Mla | None = None
    moe: Moe | None = None

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "dtype_nbytes")
        for field in sizes:
            if getattr(self, field) < 1:
                raise InvalidInput(f"{self.name}: {field} is {getattr(self, field)}", param=field)
        if self.num_heads % self.num_kv_heads:
            raise InvalidInput(f"{self.name}: {self.num_heads} heads over {self.num_kv_heads} KV heads")
        if not 0 <= self.num_window_layers <= self.num_layers or (self.num_window_layers > 0) != (
            self.window is not None
        ):
            raise InvalidInput(f"{self.name}: {self.num_window_layers} layers with a window of {self.window} tokens")

    # --- KV ---

    @property
    def kv_nbytes_per_token_layer(self) -> int:
        if self.mla is not None:
            return (self.mla.kv_rank + self.mla.rope_dim) * self.dtype_nbytes
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_nbytes

    @property
    def kv_nbytes_per_token(self) -> int:
        """What the pool stores for a token: all layers, windowed ones too."""
        return self.num_layers * self.kv_nbytes_per_token_layer

    # --- weights ---

    @property
    def num_params(self) -> int:
        """All weights, embeddings included."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return embeddings + self.hidden_size + self._layer_params(active_only=False)

    @property
    def num_active_params(self) -> int:
        """The weights a token is multiplied with: no embedding table, only its own experts."""
        return self.vocab_size * self.hidden_size + self._layer_params(active_only=True)

    @property
    def num_routed_params(self) -> int:
        """The weights of all routed experts together: those a step reads only as far as its tokens need them."""
        if self.moe is None:
            return 0
        return (self.num_layers - self.moe.num_dense_layers) * self.moe.num_experts * self._mlp(self.moe.expert_size)

    @property
    def num_layer_params(self) -> int:
        """The active weights without the vocabulary: what every prompt token is multiplied with (only the last
        one needs the output head)."""
        return self._layer_params(active_only=True)

    @property
    def weights_nbytes(self) -> int:
        return self.num_params * self.weight_nbytes

    def _layer_params(self, *, active_only: bool) -> int:
        per_layer = self._attention_params() + self.norms_per_layer * self.hidden_size
        return self.num_layers * per_layer + self._mlp_params(active_only)

    def _attention_params(self) -> int:
        if self.mla is not None:
            return self._mla_params(self.mla)
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        biases = query + 2 * kv if self.qkv_bias else 0
        norms = 2 * self.head_dim if self.qk_norm else 0
        return 2 * self.hidden_size * (query + kv) + biases + norms

    def _mla_params(self, mla: Mla) -> int:
        query_dim = self.num_heads * (mla.nope_dim + mla.rope_dim)
        if mla.query_rank is None:
            query = self.hidden_size * query_dim
        else:
            query = mla.query_rank * (self.hidden_size + query_dim + 1)  # + 1: the norm between the two
        down = self.hidden_size * (mla.kv_rank + mla.rope_dim) + mla.kv_rank
        up = mla.kv_rank * self.num_heads * (mla.nope_dim + mla.value_dim)
        return query + down + up + self.num_heads * mla.value_dim * self.hidden_size

    def _mlp_params(self, active_only: bool) -> int:
        if self.moe is None:
            return self.num_layers * self._mlp(self.intermediate_size)
        experts = self.moe.num_active if active_only else self.moe.num_experts
        router = self.moe.num_experts * (self.hidden_size + int(self.moe.router_bias))
        sparse = experts * self._mlp(self.moe.expert_size) + self._mlp(self.moe.shared_size) + router
        dense_layers = self.moe.num_dense_layers
        return dense_layers * self._mlp(self.intermediate_size) + (self.num_layers - dense_layers) * sparse

    def _mlp(self, intermediate_size: int) -> int:
        return 3 * self.hidden_size * intermediate_size  # gate, up, down

    # --- operations ---

    @property
    def pair_flops_per_layer(self) -> int:
        """Operations of one layer for one (query, key) pair of a prefill: the score and the weighted value."""
        if self.mla is not None:
            return 2 * self.num_heads * (self.mla.nope_dim + self.mla.rope_dim + self.mla.value_dim)
        return 4 * self.num_heads * self.head_dim

    @property
    def decode_pair_flops_per_layer(self) -> int:
        """The same in a decode step, where MLA works on the latent itself instead of expanding it."""
        if self.mla is not None:
            return 2 * self.num_heads * (2 * self.mla.kv_rank + self.mla.rope_dim)
        return self.pair_flops_per_layer


def _pairs(num_tokens: int) -> int:
    return num_tokens * (num_tokens + 1) // 2


def windowed_pairs(num_tokens: int, window: int) -> int:
    """(query, key) pairs of the first num_tokens tokens when each sees itself and at most window - 1 before it."""
    inside = min(num_tokens, window)
    return _pairs(inside) + (num_tokens - inside) * window
