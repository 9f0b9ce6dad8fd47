"""The tokenizer of the default model and its chat template; streaming never shows half a character."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from moonpool.base.errors import InvalidInput, ModelError
from moonpool.engine.model_files import resolve
from moonpool.engine.tokenizer import ChatTemplate, Tokenizer, load_tokenizer


def _byte_tokenizer() -> Tokenizer:
    """Each byte is a token, so every character beyond ASCII comes in parts."""
    vocabulary = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, eos_ids=(), vocab_size=256, chat_template=None)


def _fallback_tokenizer() -> Tokenizer:
    """Bytes as <0x..> tokens, joined by the byte-fallback decoder, as in SentencePiece models."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend, eos_ids=(), vocab_size=256, chat_template=None)


BYTES, FALLBACK = _byte_tokenizer(), _fallback_tokenizer()


@given(st.text(max_size=30))
def test_streamed_text_is_whole_characters_and_adds_up(text: str) -> None:
    stream = BYTES.stream()
    parts = [stream.push(token) for token in BYTES.encode(text)]
    assert "".join(parts) + stream.flush() == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_streamed_garbage_adds_up_to_what_decode_gives(tokens: list[int]) -> None:
    stream = BYTES.stream()
    assert "".join(map(stream.push, tokens)) + stream.flush() == BYTES.decode(tokens)
    grouped = "".join(stream.push(*tokens[at : at + 3]) for at in range(0, len(tokens), 3)) + stream.flush()
    assert grouped == BYTES.decode(tokens), "however many tokens come at a time"


@given(st.text(min_size=1, max_size=20))
def test_byte_fallback_streams_whole_characters(text: str) -> None:
    tokens = list(text.encode())
    stream = FALLBACK.stream()
    parts = [stream.push(token) for token in tokens]
    assert "".join(parts) + stream.flush() == text


def test_text_that_is_no_text_is_the_callers_fault() -> None:
    with pytest.raises(InvalidInput):
        BYTES.encode("\ud800")


def test_a_model_without_template_refuses_chats() -> None:
    with pytest.raises(InvalidInput, match="no chat template"):
        BYTES.render_chat([{"role": "user", "content": "x"}])


def test_templates_get_the_usual_helpers() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}{{ m | tojson }}{% if loop.last %}{% break %}{% endif %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ tools | length if tools }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render([{"role": "user", "content": "é<"}]) == '<s>{"role": "user", "content": "é<"}4'
    assert template.render([], tools=[{}, {}]) == "<s>42"
    with pytest.raises(InvalidInput, match="no tools"):
        template.render([{"role": "tool"}])


def test_templates_cannot_reach_out_and_must_compile() -> None:
    escape = ChatTemplate("{{ messages.__class__.__mro__ }}", {})
    with pytest.raises(InvalidInput):
        escape.render([])
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% for %}", {})


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(resolve("smollm2"))


@pytest.mark.model
def test_the_default_models_chat_and_tokens(smollm2: Tokenizer) -> None:
    text = smollm2.render_chat([{"role": "user", "content": "What is 123?"}])
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nWhat is 123?<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.encode(text)
    assert ids[0] == 1
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert smollm2.decode(smollm2.encode("123"), skip_special_tokens=True) == "123"
    assert len(smollm2.encode("123")) == 3  # each digit is a token
    assert smollm2.eos_ids == (2,)
    assert smollm2.token_text(2) == "<|im_end|>"


@pytest.mark.model
@given(text=st.text(max_size=60))
def test_the_default_model_round_trips_text(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    decoded = smollm2.decode(ids, skip_special_tokens=False)
    if text.isascii() and text.isprintable():  # its vocabulary lacks a few bytes of rare characters
        assert decoded == text
    stream = smollm2.stream(skip_special_tokens=False)
    assert "".join(map(stream.push, ids)) + stream.flush() == decoded


@pytest.mark.model
@given(st.text(), st.booleans())
def test_the_call_that_lets_other_threads_run_gives_the_same_tokens(
    smollm2: Tokenizer, text: str, add_special_tokens: bool
) -> None:
    expected = smollm2._backend.encode(text, add_special_tokens=add_special_tokens).ids
    tokens = smollm2.encode(text, add_special_tokens=add_special_tokens)
    assert tokens == expected
    if text.isascii() and text.isprintable():  # its vocabulary lacks a few bytes of rare characters
        assert len(text) <= len(tokens) * smollm2.max_token_chars


def test_importing_the_front_ends_parts_imports_no_torch(tmp_path: Path) -> None:
    parts = ["config", "kv_memory", "model_files", "model_fetch", "tokenizer"]
    code = ";".join(f"import moonpool.engine.{part}" for part in parts)
    code += ";import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60).returncode == 0
