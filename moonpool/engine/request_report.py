"""What a worker reports of its requests: their numbers, and which of them have changed since the last report. Pure.

Conductors price the prompts of a worker themselves, each with its own cost models, and tell the requests of other
conductors from their own by the ids. A decoding answer has the same numbers until it ends, so a report names few
requests: those that came, left, began to decode, or were computed in the steps since the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from moonpool.base.cluster import MAX_REPORTED, ReportedRequest
from moonpool.engine.sequence import Sequence, SequenceStatus


def reported_sequences(sequences: Iterable[Sequence]) -> dict[str, ReportedRequest]:
    """Return the numbers of these requests, by id, without those that are only held until they are handed over."""
    ended = SequenceStatus.HELD, SequenceStatus.GONE
    found = [_prompt(each) if each.prefill_only else _answer(each) for each in sequences if each.status not in ended]
    return {one.request_id: one for one in found}


def reported_stage(name: str, num_tokens: int) -> ReportedRequest:
    """Return the numbers of a pipeline's stage that has as much to compute as whole prompts of `num_tokens` tokens."""
    return ReportedRequest(_request_id(name), num_tokens)


def _request_id(name: str) -> str:
    """Return the request's id: a worker's sequences are named by it and the attempt, behind the last slash."""
    return name.rpartition("/")[0] or name


def _prompt(sequence: Sequence) -> ReportedRequest:
    is_begun = sequence.status is SequenceStatus.RUNNING
    reused = sequence.num_computed_tokens if is_begun else min(sequence.expected_tokens, sequence.num_tokens - 1)
    name, left = _request_id(sequence.request_id), sequence.num_tokens - reused
    return ReportedRequest(name, left, reused, tenant=sequence.tenant, weight=sequence.weight)


def _answer(sequence: Sequence) -> ReportedRequest:
    num_tokens, has_pages = sequence.num_prompt_tokens, bool(sequence.pages)
    # One that was preempted goes on soon, and counts as decoding meanwhile.
    computed = num_tokens if has_pages or sequence.num_preemptions else 0
    name = _request_id(sequence.request_id)
    return ReportedRequest(name, num_tokens - computed, computed, sequence.params.max_tokens)


class RequestChanges:
    """The requests as one conductor knows them from the reports so far."""

    def __init__(self) -> None:
        self._told: dict[str, ReportedRequest] = {}

    def start_over(self) -> None:
        """The conductor knows none: the next report is the first one of a registration."""
        self._told = {}

    def take(self, present: Mapping[str, ReportedRequest]) -> tuple[tuple[ReportedRequest, ...], tuple[str, ...]]:
        """Return the next report's requests, new or changed, and the ids of those that are gone: at most MAX_REPORTED
        of each. The others are returned by the next calls."""
        told = self._told
        changed = tuple(islice((one for name, one in present.items() if told.get(name) != one), MAX_REPORTED))
        gone = tuple(islice((name for name in told if name not in present), MAX_REPORTED))
        for name in gone:
            del told[name]
        told.update((one.request_id, one) for one in changed)
        return changed, gone
