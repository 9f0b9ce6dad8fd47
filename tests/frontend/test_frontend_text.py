from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from letter_codec import LetterDecoder

from moonpool.frontend.text import StopMatcher, TextAssembler, TextDelta

LETTERS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """What the module promises, letter by letter."""
    for end in range(1, len(text) + 1):
        ending = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(ending)], True
    return text, False


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(at % (len(text) + 1) for at in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(LETTERS, STOPS, st.lists(st.integers(0, 100), max_size=10))
def test_matches_are_those_of_a_naive_search_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher, shown, stopped = StopMatcher(stops), "", False
    wanted, wanted_stop = naive(text, stops)
    for piece in cut(text, cuts):
        new, stopped = matcher.push(piece)
        shown += new
        assert wanted.startswith(shown), "text was shown that has to be taken back"
        if stopped:
            break
    else:
        shown += matcher.finish()
    assert (shown, stopped) == (wanted, wanted_stop)


def test_only_a_possible_beginning_is_withheld() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("abcST") == ("abc", False)
    assert matcher.push("A") == ("STA", False)
    assert matcher.push("ST") == ("", False)
    assert matcher.push("OPx") == ("", True)


def test_without_stops_nothing_is_withheld() -> None:
    matcher = StopMatcher([])
    assert matcher.push("abc") == ("abc", False)
    assert matcher.finish() == ""


def run(text: str, reason: str, stops: list[str], min_tokens: int = 0) -> list[TextDelta]:
    assembler, pieces = TextAssembler(LetterDecoder(), stops, min_tokens), []
    for at, letter in enumerate(text, start=1):
        pieces.append(assembler.push(ord(letter), reason if at == len(text) else None))
        if pieces[-1].finish_reason is not None:
            break
    return pieces


def test_a_stop_token_has_no_text() -> None:
    assert run("ab$", "stop", []) == [("a", None), ("b", None), ("", "stop")]


def test_tokens_that_come_together_have_the_text_of_single_ones() -> None:
    for reason in ("stop", "length"):
        assembler = TextAssembler(LetterDecoder(), [])
        assert assembler.push_all([ord("a"), ord("b")], None) == ("ab", None)
        last = assembler.push_all([ord("c"), ord("$")], reason)
        assert last == ("".join(piece.text for piece in run("c$", reason, [])), reason)
    assert TextAssembler(LetterDecoder(), []).push_all([], "length") == ("", "length")


def test_withheld_text_comes_out_at_the_end() -> None:
    assert run("aS", "length", ["STOP"]) == [("a", None), ("S", "length")]


def test_a_stop_string_in_the_last_token_wins_over_length() -> None:
    assert run("aST", "length", ["ST"]) == [("a", None), ("", None), ("", "stop")]


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    pieces = run("xxaxb", "length", ["x"], min_tokens=3)
    assert "".join(piece.text for piece in pieces) == "xxa"
    assert pieces[-1].finish_reason == "stop"


class SlowDecoder:
    """Holds everything back until it is flushed."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, *tokens: int) -> str:
        self._held += "".join(map(chr, tokens))
        return ""

    def flush(self) -> str:
        return self._held


def test_a_stop_string_in_flushed_text_is_found() -> None:
    assembler = TextAssembler(SlowDecoder(), ["b"])
    assert assembler.push(ord("a"), None) == ("", None)
    assert assembler.push(ord("b"), "length") == ("a", "stop")
