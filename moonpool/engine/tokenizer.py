"""Text to tokens and back, for Hugging Face folders and GGUF files alike, with the model's chat template. No torch.

tokenizer = load_tokenizer(files)
ids = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "Hello"}]))
stream = tokenizer.stream()
text = "".join(stream.push(token) for token in output) + stream.flush()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from moonpool.base.errors import InvalidInput, ModelError
from moonpool.engine.chat_template import ChatTemplate, Message
from moonpool.engine.config import ModelConfig
from moonpool.engine.gguf_file import GgufFile
from moonpool.engine.gguf_vocabulary import build_tokenizer, special_tokens
from moonpool.engine.model_files import ModelFiles, read_config, read_json

# What decoding shows in place of bytes that are no character (yet): one mark or, by byte fallback, one per byte.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """One model's tokenizer. Stateless after construction; may be shared by threads."""

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
        """Token ids. `add_special_tokens` adds what the model wants before plain text (not before a chat).

        Other threads run meanwhile: of the library's calls only those for batches release the interpreter lock.
        """
        try:
            return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        except (TypeError, ValueError, UnicodeError) as error:  # e.g. lone surrogates
            raise InvalidInput(f"the text cannot be tokenized: {error}", param="prompt") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token: int) -> str:
        """One token on its own, special ones spelled out; for logprobs."""
        return self.decode([token], skip_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation as the model was trained to read it; InvalidInput if it cannot be."""
        if self._chat_template is None:
            raise InvalidInput("this model has no chat template; use /v1/completions", param="messages")
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    def stream(self, *, skip_special_tokens: bool = True) -> StreamDecoder:
        return StreamDecoder(self, skip_special_tokens=skip_special_tokens)


class StreamDecoder:
    """Text of tokens as they come. All pushes and the flush together give what decode gives of all tokens.

    A character whose bytes are not all there yet is held back. Each push decodes only a short window: the tokens
    since the last whole character and, because some tokenizers look at a token's neighbour, the ones before.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_context = 0  # leading tokens of the window whose text is out
        self._num_emitted = 0  # characters of the window's text that are out

    def push(self, token: int) -> str:
        """The new whole characters; often one word, sometimes nothing."""
        self._window.append(token)
        text = self._decode(self._window)
        whole = text.rstrip(_UNFINISHED)
        new = whole[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(whole))
        if len(whole) == len(text):
            self._advance()
        return new

    def flush(self) -> str:
        """What is held back, once no token will follow."""
        rest = self._decode(self._window)[self._num_emitted :]
        self._window, self._num_context, self._num_emitted = [], 0, 0
        return rest

    def _advance(self) -> None:
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._num_emitted = len(self._decode(self._window))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """The tokenizer that comes with a model; ModelError when there is none or it is not supported."""
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
    """chat_template.jinja wins; tokenizer_config.json holds one template or a list of named ones."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        return next((t["template"] for t in template if t.get("name") == "default"), None)
    return template


def _special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens are written as text or as an object with `content`."""
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
