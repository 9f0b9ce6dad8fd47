"""Builds a tokenizer from GGUF metadata: a byte-level BPE vocabulary and how the model's family splits text first.

The split is named in the metadata. One that is not known here is refused: a near miss would tokenize almost
every prompt right and the rest silently wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from moonpool.base.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_SPECIALS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# The split of Llama 3 and Qwen 2 differ in how many digits stay together.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer; ModelError when its kind is not supported or its tables are missing."""
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        kind = metadata.get("tokenizer.ggml.model")
        raise ModelError(f"GGUF tokenizer kind {kind!r} is not supported, only byte-level BPE ('gpt2')")
    split = metadata.get("tokenizer.ggml.pre", "gpt-2")
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges = [_merge(pair) for pair in metadata["tokenizer.ggml.merges"]]
    except KeyError as error:
        raise ModelError(f"the GGUF file has no {error.args[0]}") from error
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split == "llama-bpe")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _splitter(split)
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(_added_tokens(metadata, tokens, _CONTROL))
    tokenizer.add_tokens(_added_tokens(metadata, tokens, _USER_DEFINED))
    _add_bos(tokenizer, metadata)
    return tokenizer


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by the names that chat templates use."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in _SPECIALS.items()}
    return {name: tokens[index] for name, index in ids.items() if index is not None}


def _merge(pair: str) -> tuple[str, str]:
    left, _, right = pair.partition(" ")
    return left, right


def _splitter(name: str) -> pre_tokenizers.PreTokenizer:
    whole_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "default"):
        return whole_words
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole_words])
    digits = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}.get(name)
    if digits is None:
        raise ModelError(f"GGUF pre-tokenizer {name!r} is not supported; supported: gpt-2, smollm, llama-bpe, qwen2")
    split = pre_tokenizers.Split(Regex(_WORDS % digits), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, as_bytes])


def _added_tokens(metadata: Mapping[str, Any], tokens: list[str], kind: int) -> list[AddedToken]:
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, token_kind in zip(tokens, kinds, strict=False)
        if token_kind == kind
    ]


def _add_bos(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    if not metadata.get("tokenizer.ggml.add_bos_token", False):
        return
    text = special_tokens(metadata).get("bos_token")
    if text is None:
        raise ModelError("the GGUF file asks for a start token but does not name one")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{text} $A", special_tokens=[(text, tokenizer.token_to_id(text))]
    )
