"""Tiny random models of each family, saved by transformers, and greedy decoding by both engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moonpool.engine.config import ModelConfig
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.kv_tensor import KvMemory
from moonpool.engine.llama import LlamaModel
from moonpool.engine.model_files import read_config, resolve
from moonpool.engine.runner import Runner
from moonpool.engine.sequence import Chunk
from moonpool.engine.weights import load_weights

if TYPE_CHECKING:  # importing it takes ten seconds, of each process that only collects tests, too
    from transformers import PreTrainedModel

BLOCK_TOKENS = 16
_SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Transformers' class of the configuration, and what differs from the shape.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied_biased": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama3_rope": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "linear_rope": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
}


def save_tiny(name: str, folder: Path, *, shards: bool = False) -> PreTrainedModel:
    """Makes the model, saves it as a Hugging Face folder and returns it."""
    import transformers

    torch.manual_seed(7)
    kind, differs = CONFIGS[name]
    make: Any = transformers.AutoModelForCausalLM.from_config
    model: PreTrainedModel = make(getattr(transformers, kind)(**_SHAPE, **differs), dtype=torch.float32)
    model.train(False)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "bias" in parameter_name or "norm" in parameter_name:  # else all zeros or ones, and untested
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size="40KB" if shards else "1GB")
    return model


def load_runner(folder: str | Path, num_pages: int = 256, block_tokens: int = BLOCK_TOKENS) -> Runner:
    files = resolve(str(folder))
    config: ModelConfig = read_config(files)
    layout = KvLayout.of(config, num_pages=num_pages, block_tokens=block_tokens, dtype="float32")
    return Runner(LlamaModel(config, load_weights(files, config)), KvMemory(layout))


@torch.inference_mode()
def greedy_by_transformers(model: PreTrainedModel, prompt: Sequence[int], num_new: int) -> list[int]:
    out: list[int] = []
    inputs, cache = torch.tensor([list(prompt)]), None
    for _ in range(num_new):
        result = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, inputs = result.past_key_values, result.logits[:, -1:].argmax(-1)
        out.append(int(inputs))
    return out


def greedy(runner: Runner, prompt: Sequence[int], num_new: int, pages: Sequence[int], chunk: int = 10**9) -> list[int]:
    """One sequence alone, prefilled in chunks."""
    tokens, done = list(prompt), 0
    while len(tokens) < len(prompt) + num_new:
        end = min(done + chunk, len(tokens))
        wants = end == len(tokens)
        logits = runner.execute([Chunk("r", done, tuple(tokens[done:end]), tuple(pages), wants)])
        assert len(logits) == int(wants)
        done = end
        if wants:
            tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]
