"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.frontend.answer import ChoiceResult
from moonpool.frontend.choice import ChoiceEvent
from moonpool.frontend.logprobs import TokenText, chat_logprobs
from moonpool.frontend.replies import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
)
from moonpool.frontend.request_handler import ClientRequest
from moonpool.frontend.schema import ChatBody
from moonpool.worker.messages import TokenOut


class ChatFormat:
    def __init__(self, order: ClientRequest, body: ChatBody, token_text: TokenText) -> None:
        self._order = order
        self._wants_logprobs = bool(body.logprobs)
        self._includes_usage = body.includes_usage
        self._token_text = token_text

    def opening(self) -> Sequence[ChatChunk]:
        return [
            self._chunk([self._choice(index, ChatDelta(role="assistant", content=""), None, None)])
            for index in range(self._order.num_choices)
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
        chunk = self._chunk([])
        chunk.usage = self._order.usage
        return [chunk]

    def whole(self, results: Sequence[ChoiceResult]) -> ChatCompletion:
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._order.created,
            model=self._order.model,
            choices=[
                ChatChoice(
                    index=result.index,
                    message=AssistantMessage(role="assistant", content=result.text, refusal=None),
                    logprobs=self._logprobs(result.tokens),
                    finish_reason=result.finish_reason,
                )
                for result in results
            ],
            usage=self._order.usage,
        )

    @property
    def _id(self) -> str:
        return f"chatcmpl-{self._order.request_id}"

    def _logprobs(self, tokens: Sequence[TokenOut]) -> ChatLogprobs | None:
        return chat_logprobs(tokens, self._token_text) if self._wants_logprobs and tokens else None

    @staticmethod
    def _choice(index: int, delta: ChatDelta, logprobs: ChatLogprobs | None, finish: str | None) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish)

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._order.created,
            model=self._order.model,
            choices=choices,
        )
        if self._includes_usage:
            chunk.usage = None  # null in all chunks but the last, as OpenAI has it
        return chunk
