"""From the bytes of a request body to token ids that fit the model.

`prepare` does all of it: limits, JSON, schema, chat template, tokenizer, room for the output. It needs no I/O and
gives the same result in a thread and in another process (prompt_process.py). What the model alone can refuse is
refused here, the cheap checks first, so that a body that is too large is never validated or tokenized.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from moonpool.base.errors import ConfigError, InvalidInput, PromptTooLong, UnknownModel
from moonpool.engine.model_files import read_config, read_sampling_defaults, resolve
from moonpool.engine.sequence import SamplingDefaults
from moonpool.engine.tokenizer import load_tokenizer
from moonpool.frontend.fields import decode_json, validated
from moonpool.frontend.schema import MAX_CHOICES_IN_ALL, ChatBody, CompletionBody, SamplingBody
from moonpool.frontend.text import TokenDecoder

_B = TypeVar("_B", bound=SamplingBody)
_OTHER_FIELDS_NBYTES = 64 * 1024
_MAX_BODY_NBYTES = 64 * 1024 * 1024  # however long the model's context is


class TextCodec(Protocol):
    """The part of engine.tokenizer.Tokenizer that the front end uses."""

    vocab_size: int
    max_token_chars: int  # no token stands for more characters

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str: ...

    def token_text(self, token: int) -> str: ...

    def stream(self) -> TokenDecoder: ...


class ModelSettings(Protocol):
    """The part of FrontendConfig that selects the model."""

    @property
    def model(self) -> str: ...

    @property
    def model_name(self) -> str | None: ...

    @property
    def max_model_len(self) -> int | None: ...


@dataclass(frozen=True)
class ServedModel:
    name: str
    codec: TextCodec
    max_model_len: int
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)  # used where a request sets no value
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_prompt_chars(self) -> int:
        """No longer text can fit the context."""
        return self.max_model_len * self.codec.max_token_chars

    @property
    def max_body_nbytes(self) -> int:
        """The longest prompt in JSON (up to three bytes per byte of UTF-8), plus room for the other fields."""
        return min(3 * self.max_prompt_chars + _OTHER_FIELDS_NBYTES, _MAX_BODY_NBYTES)

    @property
    def max_messages(self) -> int:
        """The limit on messages, and on parts of messages: each takes at least one token."""
        return self.max_model_len

    def check_name(self, name: str) -> None:
        """Raise UnknownModel unless `name` is the served model."""
        if name != self.name:
            shown = f"{name[:80]!r}"
            raise UnknownModel(f"the model {shown} does not exist; this server serves {self.name!r}", param="model")


def load_model(settings: ModelSettings) -> ServedModel:
    """Load the tokenizer and the context length; the workers load the weights."""
    files = resolve(settings.model)
    longest = read_config(files).max_position
    if settings.max_model_len is not None and settings.max_model_len > longest:
        raise ConfigError(f"max_model_len is {settings.max_model_len}, the model has {longest}", param="max_model_len")
    return ServedModel(
        name=settings.model_name or files.name,
        codec=load_tokenizer(files),
        max_model_len=settings.max_model_len or longest,
        sampling=read_sampling_defaults(files),
    )


@dataclass(frozen=True)
class Prepared(Generic[_B]):
    """A checked request. The tokens of each prompt leave room for the output that `body` asks for."""

    body: _B
    prompts: list[list[int]]


@dataclass(frozen=True)
class Endpoint(Generic[_B]):
    """What differs between the two endpoints: their bodies, and how these become prompts."""

    name: str
    body_type: type[_B]
    check_size: Callable[[ServedModel, Any], None]
    encode: Callable[[TextCodec, _B], list[list[int]]]
    placeholder: object  # a valid value of the prompt's field, used when the real prompt is no longer needed


def prepare(model: ServedModel, endpoint: Endpoint[_B], raw: bytes) -> Prepared[_B]:
    """Return the checked body and its prompts. Raise InvalidInput, UnknownModel or PromptTooLong."""
    data = decode_json(raw)
    if isinstance(data, dict):
        endpoint.check_size(model, data.get(endpoint.body_type.PROMPT_FIELD))
    body = validated(endpoint.body_type, data)
    model.check_name(body.model)
    _check_stop_tokens(model, body)
    prompts = endpoint.encode(model.codec, body)
    if len(prompts) * body.num_choices > MAX_CHOICES_IN_ALL:
        raise InvalidInput(f"at most {MAX_CHOICES_IN_ALL} choices per request are allowed", param="n")
    for prompt in prompts:
        room = output_room(len(prompt), body, model.max_model_len)
        body.sampling(max_tokens=room, seed=0, defaults=model.sampling)
    return Prepared(body, prompts)


def output_room(num_prompt_tokens: int, body: SamplingBody, max_len: int) -> int:
    """Return how many tokens may be generated. Raise PromptTooLong if the prompt and the requested output do not fit
    the context, InvalidInput if fewer than `min_tokens` may be."""
    room = _room(num_prompt_tokens, body, max_len)
    if body.min_tokens is not None and body.min_tokens > room:
        raise InvalidInput(f"min_tokens must be at most {room} here", param="min_tokens")
    return room


def _room(num_prompt_tokens: int, body: SamplingBody, max_len: int) -> int:
    room = max_len - num_prompt_tokens
    wanted_tokens = body.wanted_tokens
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens} tokens; the context is {max_len} tokens, output included",
            param=body.PROMPT_FIELD,
        )
    if wanted_tokens is None:
        return room if body.DEFAULT_TOKENS is None else min(room, body.DEFAULT_TOKENS)
    if wanted_tokens > room:
        raise PromptTooLong(
            f"{num_prompt_tokens} prompt tokens and {wanted_tokens} output tokens "
            f"exceed the context of {max_len} tokens",
            param="max_tokens",
        )
    return wanted_tokens


def _check_stop_tokens(model: ServedModel, body: SamplingBody) -> None:
    if max(body.stop_token_ids or (), default=0) >= model.codec.vocab_size:
        raise InvalidInput(f"token ids must be below {model.codec.vocab_size}", param="stop_token_ids")


def _check_messages_size(model: ServedModel, messages: Any) -> None:
    """Raise PromptTooLong for too many messages, parts or characters. The schema refuses wrong types."""
    if not isinstance(messages, list):
        return
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if max(len(messages), len(parts)) > model.max_messages:
        raise PromptTooLong(
            f"{max(len(messages), len(parts))} messages or parts; at most {model.max_messages} fit "
            f"the context of {model.max_model_len} tokens",
            param="messages",
        )
    names = [message.get("name") for message in messages if isinstance(message, dict)]
    texts = [*contents, *names, *(part.get("text") for part in parts if isinstance(part, dict))]
    _check_chars(model, sum(len(text) for text in texts if isinstance(text, str)), "messages")


def _check_prompt_size(model: ServedModel, prompt: Any) -> None:
    """Raise PromptTooLong for a prompt of too many characters or token ids. The schema refuses wrong types."""
    prompts = (
        prompt if isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt[:1]) else [prompt]
    )
    for one in prompts:
        if isinstance(one, str):
            _check_chars(model, len(one), "prompt")
        elif isinstance(one, list) and len(one) > model.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(one)} tokens; the context is {model.max_model_len} tokens, output included",
                param="prompt",
            )


def _check_chars(model: ServedModel, num_chars: int, param: str) -> None:
    if num_chars > model.max_prompt_chars:
        raise PromptTooLong(
            f"the prompt has {num_chars} characters; no text of more than {model.max_prompt_chars} characters fits "
            f"the context of {model.max_model_len} tokens",
            param=param,
        )


def _encode_chat(codec: TextCodec, body: ChatBody) -> list[list[int]]:
    """Return the conversation as one prompt. Raise InvalidInput if the model's template refuses it."""
    text = codec.render_chat([message.as_template_input() for message in body.messages])
    return [codec.encode(text)]


def _encode_completion(codec: TextCodec, body: CompletionBody) -> list[list[int]]:
    """Return the tokens of each prompt. Raise InvalidInput for an empty prompt or unknown token ids."""
    prompts = []
    for prompt in body.prompts:
        tokens = codec.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        if not tokens:
            raise InvalidInput("the prompt is empty", param="prompt")
        if max(tokens) >= codec.vocab_size:
            raise InvalidInput(f"token ids must be below {codec.vocab_size}", param="prompt")
        prompts.append(tokens)
    return prompts


CHAT = Endpoint("chat", ChatBody, _check_messages_size, _encode_chat, [{"role": "user", "content": ""}])
COMPLETION = Endpoint("completion", CompletionBody, _check_prompt_size, _encode_completion, "")
