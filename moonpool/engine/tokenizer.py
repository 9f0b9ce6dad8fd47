"""Text to tokens and back, for Hugging Face folders and GGUF files, with the model's chat template. No torch.

    tokenizer = load_tokenizer(files)
    ids = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "Hello"}]))
    stream = tokenizer.stream()
    text = "".join(stream.push(token) for token in output) + stream.flush()

A chat template is a foreign program (Jinja, as Hugging Face defines it). It runs in Jinja's immutable sandbox and sees
messages, tools and the special tokens, nothing else. Messages that it rejects raise InvalidInput.

A GGUF file holds a byte-level BPE vocabulary and names how the model's family splits text first. An unknown split is
refused: a similar one would tokenize almost every prompt right and the rest silently wrong.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from moonpool.base.errors import InvalidInput, ModelError
from moonpool.engine.config import ModelConfig
from moonpool.engine.gguf_file import GgufFile
from moonpool.engine.model_files import ModelFiles, read_config, read_json

Message = Mapping[str, Any]

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_SPECIALS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# The split of Llama 3 and Qwen 2 differ in how many digits stay together.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# What decoding shows for bytes that are not a whole character: one mark or, by byte fallback, one per byte.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """One model's tokenizer. Stateless after construction; threads may share it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: tuple[int, ...],
        vocab_size: int,
        chat_template: ChatTemplate | None,
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        self.eos_ids = eos_ids
        self.vocab_size = vocab_size
        # Byte-level vocabularies write one character per byte, so this is never too small.
        self.max_token_chars = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return token ids. `add_special_tokens` adds the tokens that the model expects before plain text (a chat
        template adds its own). Other threads run meanwhile: of the library's calls only those for batches release the
        interpreter lock."""
        try:
            return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        except (TypeError, ValueError, UnicodeError) as error:  # e.g. lone surrogates
            raise InvalidInput(f"the text cannot be tokenized: {error}", param="prompt") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token: int) -> str:
        """Return the text of one token, also of a special one; for logprobs."""
        return self.decode([token], skip_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the text of a conversation in the model's chat format. Raise InvalidInput if the model has no chat
        template or its template rejects the messages."""
        if self._chat_template is None:
            raise InvalidInput("this model has no chat template; use /v1/completions", param="messages")
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    def stream(self, *, skip_special_tokens: bool = True) -> StreamDecoder:
        return StreamDecoder(self, skip_special_tokens=skip_special_tokens)


class StreamDecoder:
    """Decodes tokens as they come. All pushes and the flush together give the text that decode gives for all tokens.

    A character is returned when all its bytes are there. Each push decodes only a short window: the tokens since the
    last whole character and, because some tokenizers look at a token's neighbour, the tokens before them.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_context = 0  # leading tokens of the window whose text was returned
        self._num_emitted = 0  # characters of the window's text that were returned; if `_is_whole`, all of them
        self._is_whole = True

    def push(self, *tokens: int) -> str:
        """Return the new whole characters; often one word, sometimes nothing."""
        if self._is_whole:
            self._num_emitted = len(self._decode(self._window)) if self._window else 0
        self._window += tokens
        text = self._decode(self._window)
        whole = text.rstrip(_UNFINISHED)
        new = whole[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(whole))
        self._is_whole = len(whole) == len(text)
        if self._is_whole:
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
        return new

    def flush(self) -> str:
        """Return the rest of the text after the last token."""
        rest = "" if self._is_whole else self._decode(self._window)[self._num_emitted :]
        self._window, self._num_context, self._num_emitted, self._is_whole = [], 0, 0, True
        return rest

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Return a model's own tokenizer. Raise ModelError if it is missing or not supported."""
    config = read_config(files)
    return _from_gguf(GgufFile.open(files.root), config) if files.kind == "gguf" else _from_folder(files.root, config)


def _from_gguf(file: GgufFile, config: ModelConfig) -> Tokenizer:
    template = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(
        build_tokenizer(file.metadata),
        eos_ids=config.eos_ids,
        vocab_size=config.vocab_size,
        chat_template=ChatTemplate(template, special_tokens(file.metadata)) if template else None,
    )


def _from_folder(folder: Path, config: ModelConfig) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path} cannot be read: {error}") from error
    settings = read_json(folder / "tokenizer_config.json", optional=True)
    template = _folder_template(folder, settings)
    return Tokenizer(
        backend,
        eos_ids=config.eos_ids or _eos_from_settings(backend, settings),
        vocab_size=config.vocab_size,
        chat_template=ChatTemplate(template, _special_texts(settings)) if template else None,
    )


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return chat_template.jinja if it exists, else the template of tokenizer_config.json (one, or a list of named
    ones)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return next((t["template"] for t in template if t.get("name") == "default"), None)
    return template


def _special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens, which the file holds as text or as an object with `content`."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            found[name] = content
    return found


def _eos_from_settings(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> tuple[int, ...]:
    text = _special_texts(settings).get("eos_token")
    token = backend.token_to_id(text) if text is not None else None
    return () if token is None else (token,)


class ChatTemplate:
    """A compiled template. The same messages give the same text, except for templates that use the date."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are keyed by the names that templates use: bos_token, eos_token, ..."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _reject
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt's text. Raise InvalidInput if the template rejects these messages."""
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
            raise InvalidInput(
                f"the model's chat template rejects these messages: {error}", param="messages"
            ) from error


def _reject(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Not Jinja's own, which escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def build_tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer of a GGUF file. Raise ModelError if its kind is not supported or its tables are missing."""
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
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = _splitter(split)
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(_added_tokens(metadata, tokens, _CONTROL))
    tokenizer.add_tokens(_added_tokens(metadata, tokens, _USER_DEFINED))
    _add_bos(tokenizer, metadata)
    return tokenizer


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by the names that chat templates use."""
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


def _add_bos(tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    if not metadata.get("tokenizer.ggml.add_bos_token", False):
        return
    text = special_tokens(metadata).get("bos_token")
    if text is None:
        raise ModelError("the GGUF file asks for a start token but does not name one")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{text} $A", special_tokens=[(text, tokenizer.token_to_id(text))]
    )
