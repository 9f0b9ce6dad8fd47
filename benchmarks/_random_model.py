"""Writes a model folder without weights, for `--random-weights`: config.json and a generated tokenizer, no downloads.

    python benchmarks/_random_model.py 8b /tmp/llama-8b
    moonpool serve --model /tmp/llama-8b --random-weights --device cuda --dtype bfloat16

Every token id has a text ("t4711;"), so that answers of random tokens are streamed like any others, and their ids can
be read from the text. A text becomes one token per byte.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_SPECIAL = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")
_TEMPLATE = (
    "<|begin|>{% for message in messages %}"
    "{{ '<|user|>' if message.role != 'assistant' else '<|assistant|>' }}{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0, "torch_dtype": "bfloat16",
    },
    "half-b": {
        "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 32_768,
        "rope_theta": 1_000_000.0, "torch_dtype": "bfloat16",
    },
    "small": {
        "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
        "rope_theta": 10_000.0, "torch_dtype": "float32",
    },
}  # fmt: skip


def write_model(folder: Path, shape: str) -> Path:
    """Write the folder; return it. Overwrites files of an earlier call."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**_LLAMA, **SHAPES[shape]}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": _SPECIAL[0], "eos_token": _SPECIAL[1], "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return folder


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Return a byte-level tokenizer: 256 bytes, the special tokens, and for every other id a word with the id in it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = (f"Ġt{i};" for i in range(len(alphabet) + len(_SPECIAL), vocab_size))
    vocabulary = {text: i for i, text in enumerate([*alphabet, *_SPECIAL, *words])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(write_model(arguments.folder, arguments.shape))
