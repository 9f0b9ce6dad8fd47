"""GGUF: weights come out as transformers had them, every truncation is refused, the vocabulary tokenizes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tiny_models import greedy, greedy_by_transformers, load_runner, save_tiny

from moonpool.base.errors import ModelError
from moonpool.engine.gguf_file import GgufFile
from moonpool.engine.model_files import read_config, resolve
from moonpool.engine.tokenizer import load_tokenizer
from moonpool.engine.weights import open_source

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _write_gguf(model: PreTrainedModel, path: Path, pre: str = "smollm", tokenizer: str = "gpt2") -> None:
    """The file llama.cpp's converter would write, with q and k rows in its paired order."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _write_vocabulary(writer, config.vocab_size, pre, tokenizer)
    for name, tensor in model.state_dict().items():
        writer.add_tensor(_gguf_name(name), _paired(name, tensor, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_vocabulary(writer: gguf.GGUFWriter, vocab_size: int, pre: str, kind: str) -> None:
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ"]
    tokens = ["<s>", "</s>", *letters, "he", "ll", "hell"]
    tokens += [f"<unused{i}>" for i in range(vocab_size - len(tokens))]
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens])
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, module = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[module]}.{kind}"


def _paired(name: str, tensor: torch.Tensor, config: object) -> torch.Tensor:
    if "q_proj" not in name and "k_proj" not in name:
        return tensor
    half = config.head_dim // 2  # type: ignore[attr-defined]
    return tensor.view(-1, 2, half, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape).contiguous()


@pytest.fixture
def tiny(tmp_path: Path, own_cache: Path) -> tuple[PreTrainedModel, Path]:
    model = save_tiny("llama", tmp_path / "hf")
    path = tmp_path / "tiny.gguf"
    _write_gguf(model, path)
    return model, path


def test_weights_and_tokens_equal_the_model_it_was_made_from(tiny: tuple[PreTrainedModel, Path]) -> None:
    model, path = tiny
    files = resolve(str(path))
    with open_source(files, read_config(files)) as source:
        for name, tensor in model.state_dict().items():
            assert torch.equal(source.read(name), tensor), name
    prompt = list(range(5, 60))
    assert greedy(load_runner(path), prompt, 8, range(5)) == greedy_by_transformers(model, prompt, 8)


def test_every_truncation_is_a_model_error(tiny: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    whole = tiny[1].read_bytes()
    for cut in [0, 3, 7, 20, 100, 1000, 3000, len(whole) // 2, len(whole) - 40]:
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelError):
            GgufFile.open(path).require_whole()


def test_a_foreign_file_is_a_model_error(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_config(resolve(str(path)))


@pytest.mark.parametrize(("pre", "kind"), [("falcon", "gpt2"), ("smollm", "llama")])
def test_unknown_tokenizers_are_refused(
    tiny: tuple[PreTrainedModel, Path], tmp_path: Path, pre: str, kind: str
) -> None:
    path = tmp_path / "other.gguf"
    _write_gguf(tiny[0], path, pre, kind)
    with pytest.raises(ModelError, match="not supported"):
        load_tokenizer(resolve(str(path)))


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_vocabulary_merges_and_special_tokens(tiny: tuple[PreTrainedModel, Path], tmp_path: Path, pre: str) -> None:
    path = tmp_path / f"{pre}.gguf"
    _write_gguf(tiny[0], path, pre)
    tokenizer = load_tokenizer(resolve(str(path)))
    ids = tokenizer.encode("hello hell</s>")
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello hell</s>"
    assert tokenizer.decode(ids) == "hello hell"
    assert len(ids) == 2 + 2 + 1  # hell o | Ġ hell | </s>
    assert tokenizer.encode("h", add_special_tokens=True) == [0, *tokenizer.encode("h")]
    assert tokenizer.eos_ids == (1,)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "BF16", "F16"])
def test_quantized_tensors_are_dequantized(tmp_path: Path, kind: str) -> None:
    quantization = GGMLQuantizationType[kind]
    values = np.random.default_rng(0).normal(size=(6, 64)).astype(np.float32)
    stored = gguf.quants.quantize(values, quantization)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("x", stored, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GgufFile.open(tmp_path / "q.gguf").read("x")
    assert np.array_equal(found, gguf.quants.dequantize(stored, quantization))
    assert np.abs(found - values).max() < 0.5
