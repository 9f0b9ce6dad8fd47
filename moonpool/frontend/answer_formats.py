"""How /v1/chat/completions and /v1/completions write their answers: whole, and as chunks of a stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

from msgspec import UNSET

from moonpool.frontend import CHAT_ID, COMPLETION_ID
from moonpool.frontend.answer import ChoiceResult
from moonpool.frontend.choice import ChoiceEvent
from moonpool.frontend.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from moonpool.frontend.request_handler import ClientRequest
from moonpool.frontend.schema import ChatBody, CompletionBody
from moonpool.worker.messages import TokenOut

TokenText: TypeAlias = Callable[[int], str]


class ChatFormat:
    def __init__(self, request: ClientRequest, body: ChatBody, token_text: TokenText) -> None:
        self._request = request
        self._wants_logprobs = bool(body.logprobs)
        self._includes_usage = body.includes_usage
        self._token_text = token_text

    def opening(self) -> Sequence[ChatChunk]:
        return [
            self._chunk([self._choice(index, ChatDelta(role="assistant", content=""), None, None)])
            for index in range(self._request.num_choices)
        ]

    def chunk(self, event: ChoiceEvent) -> ChatChunk | None:
        logprobs = self._logprobs(event.tokens)
        if not event.text and event.finish_reason is None and logprobs is None:
            return None
        delta = ChatDelta(content=event.text) if event.text else ChatDelta()
        return self._chunk([self._choice(event.index, delta, logprobs, event.finish_reason)])

    def closing(self) -> Sequence[ChatChunk]:
        if not self._includes_usage:
            return []
        return [self._chunk([], self._request.usage)]

    def whole(self, results: Sequence[ChoiceResult]) -> ChatCompletion:
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._request.created,
            model=self._request.model,
            choices=[
                ChatChoice(
                    index=result.index,
                    message=AssistantMessage(role="assistant", content=result.text),
                    logprobs=self._logprobs(result.tokens),
                    finish_reason=result.finish_reason,
                )
                for result in results
            ],
            usage=self._request.usage,
        )

    @property
    def _id(self) -> str:
        return f"{CHAT_ID}{self._request.request_id}"

    def _logprobs(self, tokens: Sequence[TokenOut]) -> ChatLogprobs | None:
        return chat_logprobs(tokens, self._token_text) if self._wants_logprobs and tokens else None

    @staticmethod
    def _choice(index: int, delta: ChatDelta, logprobs: ChatLogprobs | None, finish: str | None) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatChunk:
        return ChatChunk(
            self._id,
            "chat.completion.chunk",
            self._request.created,
            self._request.model,
            choices,
            usage if self._includes_usage else UNSET,  # null in all chunks but the last, as in OpenAI's API
        )


class CompletionFormat:
    def __init__(self, request: ClientRequest, body: CompletionBody, token_text: TokenText) -> None:
        self._request = request
        self._wants_logprobs = body.logprobs is not None
        self._includes_usage = body.includes_usage
        self._token_text = token_text
        self._offsets: Counter[int] = Counter()  # characters so far, per choice

    def opening(self) -> Sequence[Completion]:
        return []

    def chunk(self, event: ChoiceEvent) -> Completion | None:
        logprobs = self._logprobs(event.index, event.tokens)
        if not event.text and event.finish_reason is None and logprobs is None:
            return None
        return self._completion([self._choice(event.index, event.text, logprobs, event.finish_reason)])

    def closing(self) -> Sequence[Completion]:
        if not self._includes_usage:
            return []
        return [self._completion([], self._request.usage)]

    def whole(self, results: Sequence[ChoiceResult]) -> Completion:
        choices = [
            self._choice(one.index, one.text, self._logprobs(one.index, one.tokens), one.finish_reason)
            for one in results
        ]
        return self._completion(choices, self._request.usage)

    def _logprobs(self, index: int, tokens: Sequence[TokenOut]) -> CompletionLogprobs | None:
        if not self._wants_logprobs or not tokens:
            return None
        logprobs = completion_logprobs(tokens, self._token_text, self._offsets[index])
        self._offsets[index] += sum(map(len, logprobs.tokens))
        return logprobs

    @staticmethod
    def _choice(index: int, text: str, logprobs: CompletionLogprobs | None, finish: str | None) -> CompletionChoice:
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(
            f"{COMPLETION_ID}{self._request.request_id}",
            "text_completion",
            self._request.created,
            self._request.model,
            choices,
            usage if usage is not None or self._includes_usage else UNSET,  # null in all chunks but the last
        )


def chat_logprobs(tokens: Sequence[TokenOut], token_text: TokenText) -> ChatLogprobs:
    return ChatLogprobs(content=[_token_logprob(out, token_text) for out in tokens])


def completion_logprobs(tokens: Sequence[TokenOut], token_text: TokenText, offset: int) -> CompletionLogprobs:
    """Return the log-probabilities. `offset` is the position of the first token in the choice's text."""
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
    assert logprob is not None, "a worker omits logprobs only if the request did not ask for them"
    return logprob
