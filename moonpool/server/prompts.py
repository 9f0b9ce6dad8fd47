"""From a checked body to token ids that fit the model. Slow for long texts, so it runs in a thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from moonpool.base.errors import InvalidInput, PromptTooLong
from moonpool.server.schema import ChatBody, CompletionBody, SamplingBody
from moonpool.server.text import TokenDecoder


class TextCodec(Protocol):
    """What the front end needs of engine.tokenizer.Tokenizer."""

    vocab_size: int

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str: ...

    def token_text(self, token: int) -> str: ...

    def stream(self) -> TokenDecoder: ...


def encode_chat(codec: TextCodec, body: ChatBody) -> list[list[int]]:
    """The conversation as one prompt. InvalidInput when the model's template does not take it."""
    text = codec.render_chat([message.as_template_input() for message in body.messages])
    return [codec.encode(text)]


def encode_completion(codec: TextCodec, body: CompletionBody) -> list[list[int]]:
    """Each prompt's tokens. InvalidInput when one is empty or has ids that the model does not know."""
    prompts = []
    for prompt in body.prompts:
        tokens = codec.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        if not tokens:
            raise InvalidInput("the prompt is empty", param="prompt")
        if max(tokens) >= codec.vocab_size:
            raise InvalidInput(f"token ids must be below {codec.vocab_size}", param="prompt")
        prompts.append(tokens)
    return prompts


def output_room(num_prompt_tokens: int, body: SamplingBody, max_model_len: int) -> int:
    """How many tokens may be generated. PromptTooLong when prompt and wish do not fit the context together."""
    room = max_model_len - num_prompt_tokens
    wanted_tokens = body.wanted_tokens
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens} tokens; the context is {max_model_len} tokens, output included",
            param=body.PROMPT_FIELD,
        )
    if wanted_tokens is None:
        return room if body.DEFAULT_TOKENS is None else min(room, body.DEFAULT_TOKENS)
    if wanted_tokens > room:
        raise PromptTooLong(
            f"{num_prompt_tokens} prompt tokens and {wanted_tokens} output tokens "
            f"exceed the context of {max_model_len} tokens",
            param="max_tokens",
        )
    return wanted_tokens
