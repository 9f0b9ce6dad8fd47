"""A ModelShape from a Hugging Face config.json, and the presets by name. Pure.

Fields that say nothing about sizes are ignored; one that is needed and missing is refused by its name, and so is a
layer kind whose KV this shape cannot count (linear attention, state space).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moonpool.base.errors import InvalidInput, UnknownModel
from moonpool.sim.physics.model_shape import Mla, ModelShape, Moe

Config = Mapping[str, Any]

_DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_WEIGHT_NBYTES = {"fp8": 1, "compressed-tensors": 1}
# Families that always have multi-head latent attention; and what each family of mixtures calls its number of experts.
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
    """The shape that a config.json describes. Raises InvalidInput naming the field that is missing or wrong."""
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
    """A shape by name; UnknownModel lists the names there are."""
    try:
        return shape_from_config(_PRESETS[name], name)
    except KeyError:
        raise UnknownModel(f"no model {name!r}; there are {', '.join(PRESET_NAMES)}") from None


def _require(config: Config, fields: Sequence[str], why: str = "") -> None:
    """InvalidInput that names all of the fields that are missing."""
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
    """How many layers see a window only, and how far it reaches."""
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
    """For configs older than layer_types: each family has its own rule."""
    if kind.startswith(("qwen", "deepseek")):
        from_layer = _optional_size(config, "max_window_layers") or 0
        return max(0, num_layers - from_layer) if config.get("use_sliding_window") else 0
    if kind.startswith(("gemma2", "gemma3")):
        every = _optional_size(config, "sliding_window_pattern") or (2 if kind.startswith("gemma2") else 6)
        return num_layers - num_layers // every  # one layer of each `every` sees everything
    return num_layers


def _mla(config: Config, kind: str) -> Mla | None:
    """Multi-head latent attention, for families that have it and wherever a field of it is there."""
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
    """Mixtral says num_local_experts, Qwen num_experts, DeepSeek n_routed_experts."""
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
    """DeepSeek names how many come first, Qwen names which, or every how many one is sparse."""
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


# The sizes in each model's published config.json.
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
