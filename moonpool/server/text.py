"""From tokens to the text a client sees, one token at a time. Pure.

Stop strings may begin in one token and end in another. Text that could still turn out to be the beginning of one is
withheld, so that what was sent never has to be taken back. Of several stop strings the one that is complete first
ends the text; of those that end at the same character, the longest. The stop string itself is not part of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class TokenDecoder(Protocol):
    """engine.tokenizer.StreamDecoder: text of tokens as they come, whole characters only."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces of any size."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._withheld = ""
        self._longest = max(map(len, stops), default=0)

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string ended it). After a match nothing more may be pushed."""
        text = self._withheld + text
        match = self._first_match(text)
        if match is not None:
            self._withheld = ""
            return text[:match], True
        shown = len(text) - self._undecided(text)
        self._withheld = text[shown:]
        return text[:shown], False

    def finish(self) -> str:
        """What was withheld: the text is over, so it was no stop string after all."""
        rest, self._withheld = self._withheld, ""
        return rest

    def _first_match(self, text: str) -> int | None:
        """Where the stop string that ends first begins."""
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(matches)[1] if matches else None

    def _undecided(self, text: str) -> int:
        """Length of the longest tail that some stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class Piece(NamedTuple):
    """Text that became visible with one token; `finish_reason` is set on the last."""

    text: str
    finish_reason: str | None


class TextAssembler:
    """The text of one choice. Stop strings count only after the first `min_tokens` tokens."""

    def __init__(self, decoder: TokenDecoder, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stops)
        self._unmatched_tokens = min_tokens

    def push(self, token: int, finish_reason: str | None) -> Piece:
        """Takes a token and why it is the last, if it is. One that ended the output as a stop has no text."""
        text = "" if finish_reason == "stop" else self._decoder.push(token)
        shown, stopped = self._match(text)
        if stopped:
            return Piece(shown, "stop")
        if finish_reason is not None:
            rest = self.finish(finish_reason)
            return Piece(shown + rest.text, rest.finish_reason)
        return Piece(shown, None)

    def finish(self, finish_reason: str) -> Piece:
        """No more tokens: all that was held back comes out, unless its last characters complete a stop string."""
        shown, stopped = self._match(self._decoder.flush())
        return Piece(shown, "stop") if stopped else Piece(shown + self._matcher.finish(), finish_reason)

    def _match(self, text: str) -> tuple[str, bool]:
        if self._unmatched_tokens > 0:
            self._unmatched_tokens -= 1
            return text, False
        return self._matcher.push(text)
