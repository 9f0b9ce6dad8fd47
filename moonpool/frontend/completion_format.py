"""Answers of /v1/completions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from moonpool.frontend.answer import ChoiceResult
from moonpool.frontend.choice import ChoiceEvent
from moonpool.frontend.logprobs import TokenText, completion_logprobs
from moonpool.frontend.replies import Completion, CompletionChoice, CompletionLogprobs
from moonpool.frontend.request_handler import ClientRequest
from moonpool.frontend.schema import CompletionBody
from moonpool.worker.messages import TokenOut


class CompletionFormat:
    def __init__(self, order: ClientRequest, body: CompletionBody, token_text: TokenText) -> None:
        self._order = order
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
        chunk = self._completion([])
        chunk.usage = self._order.usage
        return [chunk]

    def whole(self, results: Sequence[ChoiceResult]) -> Completion:
        choices = [
            self._choice(one.index, one.text, self._logprobs(one.index, one.tokens), one.finish_reason)
            for one in results
        ]
        completion = self._completion(choices)
        completion.usage = self._order.usage
        return completion

    def _logprobs(self, index: int, tokens: Sequence[TokenOut]) -> CompletionLogprobs | None:
        if not self._wants_logprobs or not tokens:
            return None
        logprobs = completion_logprobs(tokens, self._token_text, self._offsets[index])
        self._offsets[index] += sum(map(len, logprobs.tokens))
        return logprobs

    @staticmethod
    def _choice(index: int, text: str, logprobs: CompletionLogprobs | None, finish: str | None) -> CompletionChoice:
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish)

    def _completion(self, choices: list[CompletionChoice]) -> Completion:
        completion = Completion(
            id=f"cmpl-{self._order.request_id}",
            object="text_completion",
            created=self._order.created,
            model=self._order.model,
            choices=choices,
        )
        if self._includes_usage:
            completion.usage = None  # null in all chunks but the last, as OpenAI has it
        return completion
