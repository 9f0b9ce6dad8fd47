"""Blocks of the pool that are brought into pages for sequences that still wait: which pages, whose, until when. Pure.

A pull ahead fills pages that no sequence has yet. When it is over, its verified blocks are published and held for the
sequence, so that the sequence finds them in this worker's own pages when it enters the batch. From then on, or when the
sequence leaves, they are blocks of the cache like others.

Promises: a page that is being filled is not given to anybody else; pages that are held for a sequence that waits are
given up before a running sequence is preempted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moonpool.base.errors import NoSpace
from moonpool.engine.blocks import PageManager
from moonpool.engine.sequence import AdmittedSequence, Sequence
from moonpool.engine.sequence_queues import SequenceQueues

_MAX_SHARE = 0.25  # of the pages, for prompts that wait


@dataclass(eq=False, slots=True)
class PullAhead:
    """One pull: `wanted` are the blocks that it brings, into pages that `owner` holds."""

    owner: str
    wanted: AdmittedSequence
    is_over: bool = False
    is_given_up: bool = False  # no sequence waits for it
    num_good: int = 0  # blocks that it has brought, once it is over

    @property
    def request_id(self) -> str:
        return self.wanted.request_id


def prompts_that_wait(pages: PageManager, ahead: PullsAhead, queues: SequenceQueues) -> Iterator[tuple[Sequence, int]]:
    """Yield the prompts that wait and have blocks in the pool, in order of arrival, each with the number of pages that
    a pull for it may have: a share of all pages for such prompts, and a page per running sequence stays free. The
    caller begins the pull before it takes the next prompt."""
    left = 1
    for sequence in queues.waiting:
        if sequence.prefill_only and sequence.num_pool_blocks:
            if left > 0:
                budget = int(pages.num_pages * _MAX_SHARE) - ahead.num_pages
                left = max(0, min(budget, pages.num_available - queues.num_running))
            yield sequence, left


class PullsAhead:
    """The pulls of the sequences of one scheduler, at most one for each. On the thread that owns the pages."""

    def __init__(self, pages: PageManager) -> None:
        self._pages = pages
        self._pulls: dict[str, PullAhead] = {}  # by request, in the order in which they began
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._pulls)

    @property
    def num_pages(self) -> int:
        """Pages that are held for sequences that wait."""
        return sum(len(self._pages.owned.get(pull.owner, ())) for pull in self._pulls.values())

    def is_under_way(self, request_id: str) -> bool:
        """Return whether blocks are being brought for this sequence; it should not enter the batch before."""
        pull = self._pulls.get(request_id)
        return pull is not None and not pull.is_over

    def end_of(self, request_id: str) -> int:
        """Return how many leading blocks of the sequence are here or on their way; 0 without a pull."""
        pull = self._pulls.get(request_id)
        return 0 if pull is None else pull.wanted.num_local_blocks + len(pull.wanted.blocks)

    def first_ready(self, waiting: Iterable[Sequence]) -> Sequence | None:
        """Return the first of the sequences for which no pull is under way."""
        return next((each for each in waiting if not self.is_under_way(each.request_id)), None)

    def begin(self, sequence: Sequence, end: int, max_pages: int) -> PullAhead | None:
        """Reserve pages for the sequence's leading blocks up to block `end`, at most `max_pages`. Return the pull that
        fills those that are not here; None if there is nothing to pull, or no page for it."""
        keys = sequence.keys[: min(end, sequence.ahead_limit, sequence.num_reusable_blocks, max_pages)]
        num_present = self._pages.count_local(keys)
        if sequence.request_id in self._pulls or num_present == len(keys):
            return None
        owner = f"ahead:{sequence.request_id}:{next(self._numbers)}"
        try:
            grant = self._pages.reserve(owner, len(keys), keys)
        except NoSpace:
            return None
        blocks = range(grant.num_present_blocks, len(keys))
        pages = [grant.pages[block] for block in blocks]
        wanted = [keys[block] for block in blocks]
        pull = PullAhead(
            owner,
            AdmittedSequence(sequence.request_id, grant.num_present_blocks, tuple(blocks), tuple(pages), tuple(wanted)),
        )
        self._pulls[sequence.request_id] = pull
        return pull

    def end(self, pull: PullAhead, num_good: int) -> None:
        """The pull is over, and nothing writes to its pages any more: publish its first `num_good` blocks, which are
        verified, and free the pages of the others."""
        wanted = pull.wanted
        pull.is_over, pull.num_good = True, num_good
        pages = self._pages.detach(pull.owner)
        self._pages.publish(wanted.pages[:num_good], wanted.keys[:num_good])
        if not pull.is_given_up:
            self._pages.hold(pull.owner, pages[: wanted.num_local_blocks + num_good])
        self._pages.free(pages)

    def give_back(self, request_id: str) -> int:
        """The sequence has its pages, or leaves: hold nothing for it any more. Return how many blocks were brought for
        it. Pages of a pull that is under way stay reserved until it ends."""
        pull = self._pulls.pop(request_id, None)
        if pull is None:
            return 0
        pull.is_given_up = True
        if pull.is_over:
            self._pages.release(pull.owner)
        return pull.num_good

    def make_room(self, num_pages: int, keep: str) -> bool:
        """Return whether `num_pages` are available, after giving back, if necessary, what is held for sequences other
        than `keep`, the latest first."""
        for request_id in reversed(list(self._pulls) if num_pages > self._pages.num_available else ()):
            if request_id != keep and not self.is_under_way(request_id):
                self.give_back(request_id)
                if num_pages <= self._pages.num_available:
                    break
        return num_pages <= self._pages.num_available
