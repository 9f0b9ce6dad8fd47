"""The sizes of a model, as far as bytes and operations depend on them: from a config.json, or a preset by name. Pure.

Counts are exact for the families named in tests (Llama, Mistral, Qwen 2/3, DeepSeek V2/V3 with MLA, Mixtral-like
mixtures, Gemma-like sliding windows). One multiply-add counts as two operations; causal attention counts what it
computes: each token against itself and the tokens before it, or against its window of them.

Fields of config.json that say nothing about sizes are ignored. A required field that is missing is refused by its name,
and so is a kind of layer whose KV cannot be counted here (linear attention, state space).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moonpool.base.errors import InvalidInput, UnknownModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Mla:
    """Multi-head latent attention: the cache holds one latent and one rotary key for all heads."""

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
    shared_size: int = 0  # intermediate size of the shared experts, which every token uses
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
    dtype_nbytes: int = 2  # of KV and activations
    weight_nbytes: int = 2  # of one weight
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: int = 2
    num_window_layers: int = 0  # layers that attend to the last `window` tokens
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
        """Return the bytes that the pool stores per token: all layers, with or without a window."""
        return self.num_layers * self.kv_nbytes_per_token_layer

    # --- weights ---

    @property
    def num_params(self) -> int:
        """Return the number of all weights, including embeddings."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return embeddings + self.hidden_size + self._layer_params(active_only=False)

    @property
    def num_active_params(self) -> int:
        """Return the number of weights that a token is multiplied with: no embedding table, only its own experts."""
        return self.vocab_size * self.hidden_size + self._layer_params(active_only=True)

    @property
    def num_routed_params(self) -> int:
        """Return the number of weights of all routed experts; a step reads only those that its tokens need."""
        if self.moe is None:
            return 0
        return (self.num_layers - self.moe.num_dense_layers) * self.moe.num_experts * self._mlp(self.moe.expert_size)

    @property
    def num_layer_params(self) -> int:
        """Return the number of active weights without the output head, which only the last prompt token needs."""
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
        """Return the operations of one layer per (query, key) pair of a prefill: the score and the weighted value."""
        if self.mla is not None:
            return 2 * self.num_heads * (self.mla.nope_dim + self.mla.rope_dim + self.mla.value_dim)
        return 4 * self.num_heads * self.head_dim

    @property
    def decode_pair_flops_per_layer(self) -> int:
        """The same in a decode step, where MLA works on the latent without expanding it."""
        if self.mla is not None:
            return 2 * self.num_heads * (2 * self.mla.kv_rank + self.mla.rope_dim)
        return self.pair_flops_per_layer


def _pairs(num_tokens: int) -> int:
    return num_tokens * (num_tokens + 1) // 2


def windowed_pairs(num_tokens: int, window: int) -> int:
    """Return the (query, key) pairs of the first num_tokens tokens, each with itself and at most window - 1 before."""
    inside = min(num_tokens, window)
    return _pairs(inside) + (num_tokens - inside) * window


Config = Mapping[str, Any]

_DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WEIGHT_NBYTES = {"fp8": 1, "compressed-tensors": 1}
# Families that always have MLA; and the field with the number of experts of each family of mixtures.
_MLA_KINDS = ("deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3", "longcat_flash")
_MLA_FIELDS = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_EXPERT_FIELDS = {
    "deepseek_v2": "n_routed_experts",
    "deepseek_v3": "n_routed_experts",
    "kimi_k2": "n_routed_experts",
    "mixtral": "num_local_experts",
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def shape_from_config(config: Config, name: str = "model") -> ModelShape:
    """Return the shape that a config.json describes. Raise InvalidInput with the field that is missing or wrong."""
    config = config.get("text_config") or config
    kind = str(config.get("model_type", ""))
    num_layers = _size(config, "num_hidden_layers")
    hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    num_window_layers, window = _windows(config, kind, num_layers)
    dtype_nbytes = _dtype_nbytes(config)
    mla = _mla(config, kind)
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_optional_size(config, "num_key_value_heads") or num_heads,
        head_dim=_optional_size(config, "head_dim") or hidden_size // num_heads,
        intermediate_size=_size(config, "intermediate_size"),
        vocab_size=_size(config, "vocab_size"),
        dtype_nbytes=dtype_nbytes,
        weight_nbytes=_weight_nbytes(config, dtype_nbytes),
        tied_embeddings=bool(config.get("tie_word_embeddings", kind.startswith("gemma"))),
        qkv_bias=kind in ("qwen2", "qwen2_moe"),
        qk_norm=kind.startswith(("qwen3", "gemma3")),
        norms_per_layer=4 if kind.startswith(("gemma2", "gemma3")) else 2,
        num_window_layers=num_window_layers,
        window=window,
        mla=mla,
        moe=_moe(config, kind, num_layers),
    )


def preset(name: str) -> ModelShape:
    """Return a shape by name. Raise UnknownModel with the existing names."""
    try:
        return shape_from_config(_PRESETS[name], name)
    except KeyError:
        raise UnknownModel(f"no model {name!r}; there are {', '.join(PRESET_NAMES)}") from None


def _require(config: Config, fields: Sequence[str], why: str = "") -> None:
    """Raise InvalidInput with all missing fields."""
    missing = [field for field in fields if config.get(field) is None]
    if missing:
        raise InvalidInput(f"the model's config has no {', '.join(missing)}{why}", param=missing[0])


def _size(config: Config, field: str) -> int:
    _require(config, [field])
    value = _optional_size(config, field)
    if not value:
        raise InvalidInput(f"{field} in the model's config is {value!r}, not a size", param=field)
    return value


def _optional_size(config: Config, field: str) -> int | None:
    value = config.get(field)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidInput(f"{field} in the model's config is {value!r}, not a size", param=field)
    return value


def _dtype_nbytes(config: Config) -> int:
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in _DTYPE_NBYTES:
        raise InvalidInput(f"the size of dtype {dtype!r} is not known", param="torch_dtype")
    return _DTYPE_NBYTES[dtype]


def _weight_nbytes(config: Config, dtype_nbytes: int) -> int:
    quantization = config.get("quantization_config") or {}
    return _WEIGHT_NBYTES.get(str(quantization.get("quant_method")), dtype_nbytes)


def _windows(config: Config, kind: str, num_layers: int) -> tuple[int, int | None]:
    """Return the number of layers with a window, and the window."""
    window = _optional_size(config, "sliding_window")
    layer_types = config.get("layer_types")
    if layer_types is not None:
        unknown = sorted({str(each) for each in layer_types} - {_SLIDING, _FULL})
        if unknown:
            raise InvalidInput(f"layers of kind {', '.join(unknown)} are not known", param="layer_types")
        num_windowed = sum(each == _SLIDING for each in layer_types)
    else:
        num_windowed = _num_windowed_by_rule(config, kind, num_layers)
    if not num_windowed or window is None:
        return 0, None
    return num_windowed, window


def _num_windowed_by_rule(config: Config, kind: str, num_layers: int) -> int:
    """Return the number of windowed layers for configs without layer_types, by the rule of each family."""
    if kind.startswith(("qwen", "deepseek")):
        from_layer = _optional_size(config, "max_window_layers") or 0
        return max(0, num_layers - from_layer) if config.get("use_sliding_window") else 0
    if kind.startswith(("gemma2", "gemma3")):
        every = _optional_size(config, "sliding_window_pattern") or (2 if kind.startswith("gemma2") else 6)
        return num_layers - num_layers // every  # one of `every` layers has full attention
    return num_layers


def _mla(config: Config, kind: str) -> Mla | None:
    """Return the MLA sizes, for families that have MLA and for configs with any of its fields; else None."""
    if not kind.startswith(_MLA_KINDS) and all(config.get(field) is None for field in _MLA_FIELDS):
        return None
    why = f": {kind or 'this model'} has multi-head latent attention (MLA), whose KV cannot be sized without"
    _require(config, _MLA_FIELDS, why)
    return Mla(
        kv_rank=_size(config, "kv_lora_rank"),
        rope_dim=_size(config, "qk_rope_head_dim"),
        nope_dim=_size(config, "qk_nope_head_dim"),
        value_dim=_size(config, "v_head_dim"),
        query_rank=_optional_size(config, "q_lora_rank"),
    )


def _moe(config: Config, kind: str, num_layers: int) -> Moe | None:
    """Return the sizes of the mixture of experts; None for a dense model."""
    names = tuple(_EXPERT_FIELDS.values())
    num_experts = next((found for name in names if (found := _optional_size(config, name))), None)
    if num_experts is None:
        field = next((name for start, name in _EXPERT_FIELDS.items() if kind.startswith(start)), None)
        if field is not None:
            _require(config, [field], f": {kind} is a mixture of experts, whose weights cannot be sized without")
        return None
    expert_size = _optional_size(config, "moe_intermediate_size") or _size(config, "intermediate_size")
    shared_experts = _optional_size(config, "n_shared_experts") or 0
    return Moe(
        num_experts=num_experts,
        num_active=_size(config, "num_experts_per_tok"),
        expert_size=expert_size,
        shared_size=shared_experts * expert_size or _optional_size(config, "shared_expert_intermediate_size") or 0,
        num_dense_layers=_num_dense_layers(config, num_layers),
        router_bias=config.get("topk_method") == "noaux_tc",
    )


def _num_dense_layers(config: Config, num_layers: int) -> int:
    """Return the number of dense layers: DeepSeek counts the first ones, Qwen lists them or gives the sparse step."""
    every = _optional_size(config, "decoder_sparse_step") or 1
    named = _optional_size(config, "first_k_dense_replace") or len(config.get("mlp_only_layers") or ())
    return min(num_layers, max(named, num_layers - num_layers // every))


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int, **more: Any) -> Config:
    return {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        **more,
    }


# Sizes from each model's published config.json.
_PRESETS: dict[str, Config] = {
    "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256),
    "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000),
    "qwen2.5-72b": _llama(80, 8192, 64, 8, 29568, 152064, model_type="qwen2"),
    "qwen3-8b": _llama(36, 4096, 32, 8, 12288, 151936, model_type="qwen3", head_dim=128),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32768, model_type="mistral"),  # v0.3: no window
    "smollm2-135m": _llama(30, 576, 9, 3, 1536, 49152, tie_word_embeddings=True),
    "deepseek-v3": _llama(
        61,
        7168,
        128,
        128,
        18432,
        129280,
        model_type="deepseek_v3",
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        topk_method="noaux_tc",
        quantization_config={"quant_method": "fp8"},
    ),
}
PRESET_NAMES = tuple(_PRESETS)
