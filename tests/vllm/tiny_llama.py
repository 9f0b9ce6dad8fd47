"""A Llama of four layers with random weights, written as a model folder that vLLM reads. No network."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

VOCAB = 512
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _MLP = 256, 4, 4, 2, 64, 512
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": _HIDDEN,
    "intermediate_size": _MLP,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_tiny_llama(folder: Path, seed: int = 7) -> None:
    """The same seed gives the same bytes."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        # Large enough that attention prefers some positions, so that wrong KV changes the tokens.
        return np.asarray(rng.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns), np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, _HIDDEN),
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
        "lm_head.weight": matrix(VOCAB, _HIDDEN),
    }
    for number in range(_LAYERS):
        layer = f"model.layers.{number}"
        weights |= {
            f"{layer}.input_layernorm.weight": np.ones(_HIDDEN, np.float32),
            f"{layer}.post_attention_layernorm.weight": np.ones(_HIDDEN, np.float32),
            f"{layer}.self_attn.q_proj.weight": matrix(_HEADS * _HEAD_DIM, _HIDDEN),
            f"{layer}.self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{layer}.self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{layer}.self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": matrix(_MLP, _HIDDEN),
            f"{layer}.mlp.up_proj.weight": matrix(_MLP, _HIDDEN),
            f"{layer}.mlp.down_proj.weight": matrix(_HIDDEN, _MLP),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    words = Tokenizer(WordLevel({f"t{token}": token for token in range(VOCAB)}, unk_token="t0"))
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
