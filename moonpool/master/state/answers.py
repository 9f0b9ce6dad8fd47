"""Answers to numbered calls: a call that arrives again is answered as before and not carried out again. Pure.

A client sends a call again when its answer was lost, also to a restarted master. Between the two another client may
have stored what the first one removed. So answers are in the journal, in one entry with what the call has changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from moonpool.master.state.records import Answered, Outcomes

MAX_CALLS = 16_384
MAX_VALUES = 1 << 20  # in all answers together; a call with more is remembered alone
_STEP = 1024  # calls in one record of a snapshot


class Answer(NamedTuple):
    """`number` is that of the key that had become unsettled last (Voids.last_number)."""

    values: list[int]
    number: int


class Answers:
    """The answers to the latest calls: MAX_CALLS, or fewer with MAX_VALUES values in all."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self._done: OrderedDict[int, Answer] = OrderedDict()
        self._num_values = 0

    def once(self, number: int, kind: int, act: Callable[[], Answer]) -> Answer:
        """Return what `act` returned when a call of this number and kind first came. Exceptions are not remembered.
        Number 0 is no number: `act` is called.
        """
        known = self._done.get(number)
        if known is not None and known.values[0] == kind:
            return known._replace(values=known.values[1:])
        answer = act()
        if number:
            kept = answer._replace(values=[kind, *answer.values])
            self._forget(number)
            self._add(number, kept)
            self._outcomes.add(Answered([number], [kept.values]))
        return answer

    def restore(self, record: Answered) -> None:
        for number, values in zip(record.numbers, record.answers, strict=True):
            self._forget(number)
            self._add(number, Answer(values, 0))

    def finish_restore(self, number: int) -> None:
        """What earlier masters have answered is settled when all keys are that were unsettled at their end: those up to
        that number."""
        for each, answer in self._done.items():
            self._done[each] = answer._replace(number=number)

    def records(self) -> Iterator[Answered]:
        """Yield all answers for a snapshot, the oldest first."""
        rest = iter(self._done.items())
        while some := list(islice(rest, _STEP)):
            yield Answered([number for number, _ in some], [answer.values for _, answer in some])

    def _forget(self, number: int) -> None:
        gone = self._done.pop(number, None)
        self._num_values -= len(gone.values) if gone is not None else 0

    def _add(self, number: int, answer: Answer) -> None:
        self._done[number] = answer
        self._num_values += len(answer.values)
        while len(self._done) > MAX_CALLS or (self._num_values > MAX_VALUES and len(self._done) > 1):
            _, gone = self._done.popitem(last=False)
            self._num_values -= len(gone.values)
