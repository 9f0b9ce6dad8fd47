"""Log-probabilities in the two shapes that OpenAI has for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.frontend.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from moonpool.worker.messages import TokenOut

TokenText = Callable[[int], str]


def chat_logprobs(tokens: Sequence[TokenOut], token_text: TokenText) -> ChatLogprobs:
    return ChatLogprobs(content=[_token_logprob(out, token_text) for out in tokens])


def completion_logprobs(tokens: Sequence[TokenOut], token_text: TokenText, offset: int) -> CompletionLogprobs:
    """`offset` is where the first token's text begins in the choice's text."""
    texts = [token_text(out.token) for out in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[_known(out.logprob) for out in tokens],
        top_logprobs=[{token_text(token): logprob for token, logprob in out.top} for out in tokens],
        text_offset=offsets,
    )


def _token_logprob(out: TokenOut, token_text: TokenText) -> TokenLogprob:
    text = token_text(out.token)
    top = [_top_logprob(token_text(token), logprob) for token, logprob in out.top]
    return TokenLogprob(token=text, logprob=_known(out.logprob), bytes=list(text.encode()), top_logprobs=top)


def _top_logprob(text: str, logprob: float) -> TopLogprob:
    return TopLogprob(token=text, logprob=logprob, bytes=list(text.encode()))


def _known(logprob: float | None) -> float:
    assert logprob is not None, "a worker leaves logprobs out only where none were asked for"
    return logprob
