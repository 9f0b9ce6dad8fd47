"""From tokens to the text a client sees, one token at a time. Pure.

Stop strings may begin in one token and end in another. Text that could be the beginning of a stop string is withheld,
so that no sent text has to be taken back. Of several stop strings the one that is complete first ends the text; of
those that end at the same character, the longest. The stop string itself is not part of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol


class TokenDecoder(Protocol):
    """engine.tokenizer.StreamDecoder: decodes tokens as they come, one or several, to text of whole characters."""

    def push(self, *tokens: int) -> str: ...

    def flush(self) -> str: ...


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces of any size.

    Each character costs a few steps per stop string, however long these are (Knuth, Morris and Pratt): clients choose
    them, and every token of every stream passes here.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = [(stop, _fallbacks(stop)) for stop in stops]
        self._matched = [0] * len(stops)  # per stop string, how many of its characters the text ends with
        self._withheld = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return (text that may be shown, whether a stop string ended it). Do not push after a match."""
        start = len(self._withheld)
        whole = self._withheld + text
        if self._stops:
            for at in range(start, len(whole)):
                length = self._step(whole[at])
                if length:
                    self._withheld = ""
                    return whole[: at + 1 - length], True
        shown = len(whole) - max(self._matched, default=0)
        self._withheld = whole[shown:]
        return whole[:shown], False

    def finish(self) -> str:
        """Return the withheld text: the text has ended, so it is not a stop string."""
        rest, self._withheld = self._withheld, ""
        return rest

    def _step(self, letter: str) -> int:
        """Take one more character; return the length of the longest stop string that ends with it, or 0."""
        longest = 0
        for number, (stop, fallbacks) in enumerate(self._stops):
            length = self._matched[number]
            while length and stop[length] != letter:
                length = fallbacks[length]
            if stop[length] == letter:
                length += 1
            self._matched[number] = length
            if length == len(stop):
                longest = max(longest, length)
        return longest


@lru_cache(maxsize=256)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """Return, for each number of matched characters, how many stay matched if the next character does not match."""
    table, length = [0, 0], 0
    for letter in stop[1:]:
        while length and stop[length] != letter:
            length = table[length]
        length += stop[length] == letter
        table.append(length)
    return tuple(table)


class TextDelta(NamedTuple):
    """Text that became visible with one token; `finish_reason` is set on the last."""

    text: str
    finish_reason: str | None


class TextAssembler:
    """The text of one choice. Stop strings count only after the first `min_tokens` tokens."""

    def __init__(self, decoder: TokenDecoder, stops: Sequence[str], min_tokens: int = 0) -> None:
        self.has_stops = bool(stops)
        self._decoder = decoder
        self._matcher = StopMatcher(stops)
        self._unmatched_tokens = min_tokens

    def push_all(self, tokens: Sequence[int], finish_reason: str | None) -> TextDelta:
        """Return what push() returns for all of these tokens together, if there are no stop strings: in one step."""
        assert not self.has_stops, "a stop string may end the text at any of the tokens"
        shown = tokens[:-1] if finish_reason == "stop" else tokens
        text = self._decoder.push(*shown) if shown else ""
        return TextDelta(text if finish_reason is None else text + self._decoder.flush(), finish_reason)

    def push(self, token: int, finish_reason: str | None) -> TextDelta:
        """Return the text that the token makes visible; a stop token has none. The last token has a finish reason."""
        text = "" if finish_reason == "stop" else self._decoder.push(token)
        shown, stopped = self._match(text)
        if stopped:
            return TextDelta(shown, "stop")
        if finish_reason is not None:
            rest = self.finish(finish_reason)
            return TextDelta(shown + rest.text, rest.finish_reason)
        return TextDelta(shown, None)

    def finish(self, finish_reason: str) -> TextDelta:
        """End the text: return what was withheld, unless its last characters complete a stop string."""
        shown, stopped = self._match(self._decoder.flush())
        return TextDelta(shown, "stop") if stopped else TextDelta(shown + self._matcher.finish(), finish_reason)

    def _match(self, text: str) -> tuple[str, bool]:
        if self._unmatched_tokens > 0:
            self._unmatched_tokens -= 1
            return text, False
        return self._matcher.push(text)
