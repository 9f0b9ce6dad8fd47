"""A tokenizer for front ends in tests: one token per character, so that a text shows its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VOCAB_SIZE = 512


class LetterCodec:
    """One token per character."""

    vocab_size = VOCAB_SIZE
    max_token_chars = 1

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [ord(letter) % VOCAB_SIZE for letter in text]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"

    def token_text(self, token: int) -> str:
        return chr(token)

    def stream(self) -> LetterDecoder:
        return LetterDecoder()


class LetterDecoder:
    def push(self, *tokens: int) -> str:
        return "".join(map(chr, tokens))

    def flush(self) -> str:
        return ""
