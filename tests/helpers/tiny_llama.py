"""A Llama of a few layers with random weights, written as a model folder that vLLM reads, too. No network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

VOCAB = 512


@dataclass(frozen=True)
class Shape:
    vocab: int = VOCAB
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 512
    max_tokens: int = 8192

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_tokens,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


FOR_VLLM = Shape()
SMALLEST = Shape(vocab=211, hidden=48, layers=3, heads=6, head_dim=8, mlp=80, max_tokens=2048)


def save_tiny_llama(folder: Path, shape: Shape = FOR_VLLM, seed: int = 7) -> None:
    """The same seed gives the same bytes."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        # Large enough that attention prefers some positions, so that wrong KV changes the tokens.
        return np.asarray(rng.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns), np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(shape.vocab, shape.hidden),
        "model.norm.weight": np.ones(shape.hidden, np.float32),
        "lm_head.weight": matrix(shape.vocab, shape.hidden),
    }
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        weights |= {
            f"{layer}.input_layernorm.weight": np.ones(shape.hidden, np.float32),
            f"{layer}.post_attention_layernorm.weight": np.ones(shape.hidden, np.float32),
            f"{layer}.self_attn.q_proj.weight": matrix(shape.heads * shape.head_dim, shape.hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(shape.kv_heads * shape.head_dim, shape.hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(shape.kv_heads * shape.head_dim, shape.hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(shape.hidden, shape.heads * shape.head_dim),
            f"{layer}.mlp.gate_proj.weight": matrix(shape.mlp, shape.hidden),
            f"{layer}.mlp.up_proj.weight": matrix(shape.mlp, shape.hidden),
            f"{layer}.mlp.down_proj.weight": matrix(shape.hidden, shape.mlp),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.config()))
    words = Tokenizer(WordLevel({f"t{token}": token for token in range(shape.vocab)}, unk_token="t0"))
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
