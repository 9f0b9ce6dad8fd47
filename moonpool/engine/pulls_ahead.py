"""Blocks of the pool that are brought into pages for sequences that wait: which pages, and when the sequence joins.
Pure.

Every pull begins while its sequence waits, and fills pages that no sequence has yet; sequences behind it pass it. When
it is over, its verified blocks are published and held for the sequence, so that the sequence finds them in this
worker's own pages when it enters the batch. A sequence may also join a step before: when the first layers are in place
and the others are expected by the time the step computes them (`join_in_s`). The step then waits layer by layer. If a
layer is late, the sequence leaves the step, and waits until its pull is over.

Promises: a page that is being filled is not given to anybody else; pages that are held for a sequence that waits are
given up before a running sequence is preempted; sequences pass another one while its pull is under way, which ends, but
not while it waits for the pages of its pull.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from moonpool.base.errors import NoSpace
from moonpool.engine.blocks import PageManager
from moonpool.engine.sequence import AdmittedSequence, Sequence, pages_for
from moonpool.engine.sequence_queues import SequenceQueues

_MAX_SHARE = 0.25  # of the pages, for sequences that wait and could not enter the batch now


class LayersHere(NamedTuple):
    """How far a pull is: its first `number` layers are in place."""

    number: int
    began_s: float
    first_s: float  # when the first of them was in place
    last_s: float

    def after(self, number: int, now_s: float) -> LayersHere:
        """Return the state when `number` layers are in place now."""
        return LayersHere(number, self.began_s, self.first_s if self.number else now_s, now_s)


def join_in_s(here: LayersHere, num_layers: int, now_s: float, compute_s: float) -> float:
    """Return how long a prompt should wait before it joins a step that computes it for `compute_s`: until its other
    layers are expected in time, as far from each other as the first ones, or as slow as the next one if that is
    overdue. Infinite before the first layer is in place.
    """
    if not here.number:
        return math.inf
    layer_s = (here.last_s - here.first_s) / (here.number - 1) if here.number > 1 else here.first_s - here.began_s
    missing_s = (num_layers - here.number) * max(layer_s, now_s - here.last_s)
    # The last layer is needed when all layers before it are computed. If it is in time, so are the others.
    return max(0.0, missing_s - compute_s * (1 - 1 / num_layers)) if missing_s else 0.0


@dataclass(eq=False, slots=True)
class PullAhead:
    """One pull: `wanted` are the blocks that it brings, into pages that `owner` holds."""

    owner: str
    wanted: AdmittedSequence
    num_before: int = 0  # blocks that an earlier pull has brought for the sequence
    may_join: bool = False  # whether the sequence may join a step before the pull is over
    has_joined: bool = False
    was_late: bool = False  # the sequence joined and had to leave again: it does so once
    is_over: bool = False
    is_given_up: bool = False  # no sequence waits for it
    num_good: int = 0  # blocks that it has brought, once it is over

    @property
    def request_id(self) -> str:
        return self.wanted.request_id

    @property
    def end(self) -> int:
        """Leading blocks of the sequence that are here or on their way."""
        return self.wanted.num_local_blocks + (self.num_good if self.is_over else len(self.wanted.blocks))


class PullsAhead:
    """The pulls of the sequences of one scheduler, at most one for each. On the thread that owns the pages."""

    def __init__(self, pages: PageManager) -> None:
        self._pages = pages
        self._pulls: dict[str, PullAhead] = {}  # by request, in the order in which they began
        self._lacking: set[str] = set()  # requests that wait for pages for their pulls
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._pulls)

    def get(self, request_id: str) -> PullAhead | None:
        return self._pulls.get(request_id)

    @property
    def num_pages(self) -> int:
        """Pages that are held for sequences that wait."""
        waiting = [pull.owner for pull in self._pulls.values() if not pull.has_joined]
        return sum(len(self._pages.owned.get(owner, ())) for owner in waiting)

    def is_awaited(self, request_id: str) -> bool:
        """Return whether the sequence cannot enter the batch before more of its pull is here; others pass it."""
        pull = self._pulls.get(request_id)
        return pull is not None and not (pull.is_over or pull.may_join)

    def lacks_pages(self, request_id: str) -> bool:
        """Return whether the sequence has to wait for pages for its pull; no other passes it."""
        return request_id in self._lacking and not self.is_awaited(request_id)

    def end_of(self, request_id: str) -> int:
        """Return how many leading blocks of the sequence are here or on their way; 0 without a pull."""
        pull = self._pulls.get(request_id)
        return 0 if pull is None else pull.end

    def first_ready(self, waiting: Iterable[Sequence]) -> Sequence | None:
        """Return the first of the sequences whose pull is not awaited; it may lack pages."""
        return next((each for each in waiting if not self.is_awaited(each.request_id)), None)

    # -- beginning pulls ---------------------------------------------------------------------------------------

    def begin_waiting(self, queues: SequenceQueues, on_begun: Callable[[Sequence, PullAhead], None]) -> None:
        """Begin pulls for sequences that wait, in order of arrival: whole if the sequence could enter the batch now,
        and otherwise within a share of all pages for prompts, while an answer waits for room. A page per running
        sequence stays free. Call it before each schedule(), unless nothing may be pulled; then call `forget_lacking`.
        """
        self.forget_lacking()
        room = self._room_for_first(queues)
        for sequence in list(islice(queues.waiting, queues.max_num_seqs)):
            wanted = _wanted_blocks(sequence)
            here = self._num_here(sequence, wanted)
            room -= pages_for(sequence.num_tokens, sequence.block_tokens) - here
            if here < wanted and not self._is_under_way(sequence.request_id):
                max_pages = self._max_pages(sequence, room, queues.num_running)
                pull = self.begin(sequence, wanted, max_pages)
                if pull is None and sequence is queues.waiting[0]:
                    # Cached pages that it reuses are no longer available, so it may need those held for later ones.
                    self.make_room(self._pages.num_pages, keep=sequence.request_id)
                    pull = self.begin(sequence, wanted, max_pages)
                if pull is not None:
                    on_begun(sequence, pull)
            if max(here, self.end_of(sequence.request_id)) < wanted:
                self._lacking.add(sequence.request_id)
        behind = islice(queues.waiting, queues.max_num_seqs, None)  # more than a batch: their turn comes later
        self._lacking.update(each.request_id for each in behind if _wanted_blocks(each))

    def forget_lacking(self) -> None:
        """Let sequences that wait for pages for their pulls enter the batch without them."""
        self._lacking = set()

    def _room_for_first(self, queues: SequenceQueues) -> int:
        """Return how many pages sequences that wait may take, after making room for the first one."""
        if queues.waiting and not self._is_under_way(queues.waiting[0].request_id):
            first = queues.waiting[0]
            missing = pages_for(first.num_tokens, first.block_tokens) - self._num_here(first)
            self.make_room(missing + queues.num_running, keep=first.request_id)
        return self._pages.num_available - queues.num_running

    def _num_here(self, sequence: Sequence, enough: int = 0) -> int:
        """Return how many leading blocks of the sequence are here or on their way; it may be less than all if it is at
        least `enough`, which saves counting."""
        here = self.end_of(sequence.request_id)
        if enough and here >= enough:
            return here
        return max(here, self._pages.count_local(sequence.keys[: sequence.num_reusable_blocks]))

    def _max_pages(self, sequence: Sequence, room: int, num_running: int) -> int:
        if room >= 0:
            return self._pages.num_pages
        if not sequence.prefill_only:
            return 0
        share = int(self._pages.num_pages * _MAX_SHARE) - self.num_pages
        return max(0, min(share, self._pages.num_available - num_running))

    def begin(self, sequence: Sequence, end: int, max_pages: int) -> PullAhead | None:
        """Reserve pages for the sequence's leading blocks up to block `end`, at most `max_pages` beside those that are
        here. Return the pull that fills them; None if there is nothing to pull, no page for it, or a pull under way."""
        if self._is_under_way(sequence.request_id):
            return None
        keys = sequence.keys[: min(end, sequence.ahead_limit, sequence.num_reusable_blocks)]
        num_present = self._pages.count_local(keys)
        keys = keys[: num_present + max_pages]
        if num_present == len(keys):
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
            num_before=self.give_back(sequence.request_id),
        )
        self._pulls[sequence.request_id] = pull
        return pull

    # -- joining a step, and the end ---------------------------------------------------------------------------

    def joinable(self, request_id: str) -> PullAhead | None:
        """Return the pull of a sequence that may join a step before it is over; None if there is none."""
        pull = self._pulls.get(request_id)
        return pull if pull is not None and pull.may_join and not pull.is_over else None

    def join(self, pull: PullAhead) -> list[int]:
        """The sequence enters the batch. Return the pages of its leading blocks, with references of its own."""
        pull.has_joined = True
        return self._pages.share(pull.owner)

    def leave(self, request_id: str) -> None:
        """The sequence that has joined waits again, until its pull is over."""
        pull = self._pulls[request_id]
        pull.may_join, pull.has_joined, pull.was_late = False, False, True

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
        return pull.num_before + pull.num_good

    def make_room(self, num_pages: int, keep: str) -> bool:
        """Return whether `num_pages` are available, after giving back, if necessary, what is held for sequences other
        than `keep`, the latest first."""
        for request_id in reversed(list(self._pulls) if num_pages > self._pages.num_available else ()):
            if request_id != keep and not self._is_under_way(request_id):
                self.give_back(request_id)
                if num_pages <= self._pages.num_available:
                    break
        return num_pages <= self._pages.num_available

    def _is_under_way(self, request_id: str) -> bool:
        pull = self._pulls.get(request_id)
        return pull is not None and not pull.is_over


def _wanted_blocks(sequence: Sequence) -> int:
    """Return how many leading blocks the sequence should find here: of a prompt those that the pool has promised, of an
    answer, whose blocks were put when they were computed, all."""
    promised = sequence.num_pool_blocks if sequence.prefill_only else sequence.num_reusable_blocks
    return min(promised, sequence.num_reusable_blocks, sequence.ahead_limit)
