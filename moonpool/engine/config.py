"""The engine's configuration: the shape of a model (ModelConfig) and how to run it (EngineConfig). No torch.

A ModelConfig comes from a Hugging Face config.json or from GGUF metadata and covers the Llama family. A feature that
the model code cannot compute exactly raises ModelError with its name, so an unsupported model never gives a wrong
token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from moonpool.base.errors import ConfigError, ModelError

DType = Literal["float32", "bfloat16", "float16"]
KvDType = Literal["float32", "bfloat16", "float16", "float8_e4m3fn"]
Device = str  # "cpu", "cuda:N", or "cuda" for the first GPU
Shape = tuple[int, ...]
DTYPE_NBYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}

_HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_DEVICE = re.compile(r"cpu|cuda(?::(0|[1-9][0-9]{0,2}))?")


def gpu_index(device: Device) -> int | None:
    """Return the number of the GPU; None for the CPU. Raise ConfigError for a text that names no device."""
    match = _DEVICE.fullmatch(device)
    if match is None:
        raise ConfigError(f"{device!r} is not a device; write cpu, cuda or cuda:N, for example cuda:1", param="device")
    return None if device == "cpu" else int(match[1] or 0)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are scaled. `divisors`, one per frequency, come from a GGUF tensor."""

    kind: Literal["linear", "llama3", "divisors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one model of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # Llama's attention_bias also adds a bias to the output projection
    qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ModelError(f"the model has {self.num_heads} heads, not a multiple of {self.num_kv_heads} KV heads")

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def rope_text(self) -> str:
        """All settings that change K for the same weights; part of the cache identity."""
        return f"half/theta={self.rope_theta!r}/scaling={self.rope_scaling!r}"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read config.json and, if present, generation_config.json, whose eos ids take precedence."""
        architecture = _hf_architecture(config)
        _refuse_unsupported(config, architecture)
        try:
            return _read_hf(config, generation or {}, architecture)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"config.json is incomplete or malformed: {error!r}") from error

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, Any], shapes: Mapping[str, Shape], rope_divisors: tuple[float, ...] = ()
    ) -> ModelConfig:
        """Read a GGUF file's metadata and tensor shapes; `rope_divisors` is its rope_freqs tensor, if any."""
        architecture = metadata.get("general.architecture")
        if architecture not in _GGUF_ARCHITECTURES:
            raise ModelError(
                f"GGUF architecture {architecture!r} is not supported; supported: {', '.join(_GGUF_ARCHITECTURES)}"
            )
        try:
            return _read_gguf(metadata, shapes, rope_divisors, architecture)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"the GGUF metadata is incomplete or malformed: {error!r}") from error


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the names and shapes of all tensors in the engine's layout (weights.py)."""
    hidden, qkv = config.hidden_size, config.query_size + 2 * config.kv_size
    layer: dict[str, Shape] = {
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
    shapes: dict[str, Shape] = {"embedding": (config.vocab_size, hidden), "norm": (hidden,)}
    if not config.tied_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    for index in range(config.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How one engine runs. `num_pages` pages of `block_tokens` tokens hold the KV of all its sequences."""

    num_pages: int
    block_tokens: int = 64
    max_batch_tokens: int = 512  # tokens computed in one step: chunked prefill's budget
    max_num_seqs: int = 32
    max_model_len: int | None = None  # prompt and output together; None: the model's maximum
    dtype: DType = "float32"
    kv_dtype: KvDType | None = None  # of KV pages; None: as dtype
    device: Device = "cpu"
    threads: int | None = None  # None: torch's default

    def __post_init__(self) -> None:
        _require(self.num_pages >= 1, "num_pages must be at least 1")
        _require(16 <= self.block_tokens <= 512, "block_tokens must be between 16 and 512")
        _require(self.max_batch_tokens >= 1, "max_batch_tokens must be at least 1")
        _require(self.max_num_seqs >= 1, "max_num_seqs must be at least 1")
        _require(self.dtype in get_args(DType), f"dtype must be one of {', '.join(get_args(DType))}")
        is_on_gpu = gpu_index(self.device) is not None  # raises ConfigError
        _require_kv_dtype(self.kv_dtype, self.dtype, is_on_gpu)
        _require(self.threads is None or self.threads >= 1, "threads must be at least 1")


def _require_kv_dtype(kv_dtype: KvDType | None, dtype: DType, is_on_gpu: bool) -> None:
    if kv_dtype in (None, dtype):
        return
    _require(kv_dtype == "float8_e4m3fn", f"kv_dtype must be float8_e4m3fn, or that of the weights, {dtype}")
    _require(
        is_on_gpu and dtype != "float32",
        "KV in float8_e4m3fn needs a GPU (--device cuda) and weights in half precision (--dtype bfloat16)",
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _hf_architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in _HF_ARCHITECTURES:
            return _HF_ARCHITECTURES[name]
    raise ModelError(f"architecture {names!r} is not supported; supported: {', '.join(_HF_ARCHITECTURES)}")


def _refuse_unsupported(config: Mapping[str, Any], architecture: str) -> None:
    """Raise ModelError for features that the model code would compute wrongly."""
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"activation {config['hidden_act']!r} is not supported, only silu")
    if config.get("mlp_bias"):
        raise ModelError("biases in the MLP are not supported")
    if config.get("quantization_config"):
        raise ModelError("quantized Hugging Face folders are not supported; use plain weights or a GGUF file")
    if _rope_parameters(config).get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError("partial rotary embeddings are not supported")
    if _slides(config, architecture):
        raise ModelError("sliding-window attention is not supported; set sliding_window to null if unused")


def _slides(config: Mapping[str, Any], architecture: str) -> bool:
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        return True
    window = config.get("sliding_window")
    if window is None or (architecture != "mistral" and not config.get("use_sliding_window")):
        return False
    return int(window) < int(config.get("max_position_embeddings", 0))


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 writes rope_parameters; earlier versions write rope_scaling beside rope_theta."""
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def _rope_scaling(parameters: Mapping[str, Any]) -> RopeScaling | None:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=float(parameters["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_max_position=int(parameters["original_max_position_embeddings"]),
        )
    raise ModelError(f"rope scaling {kind!r} is not supported; supported: linear, llama3")


def _read_hf(config: Mapping[str, Any], generation: Mapping[str, Any], architecture: str) -> ModelConfig:
    rope = _rope_parameters(config)
    num_heads = int(config["num_attention_heads"])
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    biased = bool(config.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
        max_position=int(config["max_position_embeddings"]),
        rms_norm_eps=float(config["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        rope_scaling=_rope_scaling(rope),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=biased or architecture == "qwen2",
        output_bias=biased,
        qk_norm=architecture == "qwen3",
        eos_ids=_id_tuple(eos),
    )


def _id_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)


def _read_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, Shape], divisors: tuple[float, ...], architecture: str
) -> ModelConfig:
    def number(key: str, default: float | None = None) -> float:
        value = metadata.get(f"{architecture}.{key}", default)
        if value is None:
            raise KeyError(f"{architecture}.{key}")
        return cast(float, value)

    num_heads = int(number("attention.head_count"))
    hidden_size = int(number("embedding_length"))
    head_dim = int(number("attention.key_length", hidden_size // num_heads))
    if int(number("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError("partial rotary embeddings are not supported")
    return ModelConfig(
        architecture=architecture,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden_size,
        intermediate_size=int(number("feed_forward_length")),
        num_layers=int(number("block_count")),
        num_heads=num_heads,
        num_kv_heads=int(number("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        max_position=int(number("context_length")),
        rms_norm_eps=float(number("attention.layer_norm_rms_epsilon")),
        rope_theta=float(number("rope.freq_base", 10_000.0)),
        rope_scaling=_gguf_rope_scaling(metadata, architecture, divisors),
        tied_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        eos_ids=_gguf_eos_ids(metadata),
    )


def _gguf_rope_scaling(
    metadata: Mapping[str, Any], architecture: str, divisors: tuple[float, ...]
) -> RopeScaling | None:
    if divisors:
        return RopeScaling("divisors", divisors=divisors)
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=float(metadata[f"{architecture}.rope.scaling.factor"]))
    raise ModelError(f"rope scaling {kind!r} is not supported in GGUF files; supported: linear")


def _gguf_eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return end of text and, if it is another token, end of turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(int(metadata[key]) for key in keys if key in metadata))
