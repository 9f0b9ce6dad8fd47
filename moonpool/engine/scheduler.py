"""Decides what each step computes: continuous batching, chunked prefill, preemption. Pure.

    schedule() -> chunks      decodes first (one token each), then prefill within the token budget; or, with
                              `prefill_first`, prompts alone as long as there are any, while the decodes wait
    complete(sampled)         accepts the step's tokens, ends sequences, seals blocks that became full

Between the two calls the step is open: the runner reads and writes the pages of its chunks. A pull from the pool that
`drain_admitted()` returned must be confirmed, rewound, put back or cancelled before the step is completed. The caller
may cancel and rewind at any time; the pages of a sequence that leaves an open step are freed when the step closes, so
no other sequence's KV can be in them while the runner still writes.

Tenants share the places of the batch and the pages by their weights (tenant_shares.py). A sequence that hands its place
to another tenant's keeps its pages, and goes on when a place is free; one that loses its pages is preempted.

A suspect sequence (`num_alone_steps`) is computed before all others and in a batch of one, so that a step that fails or
kills its process shows which sequence caused it.

Promises: the earliest sequence always advances, so none starves; a sealed block is never written again; only complete
blocks computed from verified KV are published.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from moonpool.base.errors import ConfigError, Internal, NoSpace, PromptTooLong
from moonpool.engine.blocks import PageManager
from moonpool.engine.pulls_ahead import PullsAhead
from moonpool.engine.sequence import (
    NO_LIMIT,
    UNKNOWN_TOKEN,
    Accepted,
    AdmittedSequence,
    Chunk,
    FinishReason,
    Sequence,
    SequenceStatus,
    StepResult,
    full_blocks,
    pages_for,
)
from moonpool.engine.sequence_queues import SequenceQueues
from moonpool.engine.tenant_shares import next_to_start, num_pages, shares, to_make_way, to_preempt, to_stand_down


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_batch_tokens: int  # computed per step, decodes included
    max_num_seqs: int  # in the batch at once
    max_seq_tokens: int  # prompt and output together
    eos_token_ids: frozenset[int] = frozenset()
    prefill_first: bool = False  # first tokens come sooner, later tokens less evenly

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_batch_tokens:
            raise ConfigError(
                f"max_num_seqs ({self.max_num_seqs}) must be between 1 and max_batch_tokens ({self.max_batch_tokens})"
            )


class Scheduler:
    def __init__(self, config: SchedulerConfig, pages: PageManager) -> None:
        self.config = config
        self.pages = pages
        self.queues = SequenceQueues(config.max_num_seqs)
        self.ahead = PullsAhead(pages)
        self.num_preemptions = 0
        self._block_tokens = pages.block_tokens
        self._plan: dict[str, int] = {}  # tokens per request in the step being scheduled
        self._step_is_open = False
        self._in_flight: dict[str, Chunk] = {}  # chunks whose outcome still counts
        self._deferred_free: list[int] = []  # pages to free when the open step closes
        self._ahead: set[str] = set()  # requests of a step that was launched ahead
        self._ahead_free: list[int] = []  # pages to free when that step is over
        self._admitted: list[AdmittedSequence] = []
        self._pulls: dict[str, AdmittedSequence] = {}  # of sequences that joined the open step, not settled yet

    # -- adding requests -----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Raise PromptTooLong or NoSpace if it could never run, AlreadyExists if its id is here."""
        self.check_fits(sequence)
        self.queues.add(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """Queue a sequence whose KV, complete and verified up to `num_computed_tokens`, is in pages already.

        The scheduler becomes the owner of the references to `sequence.pages`; if it raises, as `add` does, the caller
        keeps them. The sequence waits with its pages until there is a place in the batch.
        """
        self.check_fits(sequence)
        computed, num_pages = sequence.num_computed_tokens, len(sequence.pages)
        if not 0 <= computed <= min(num_pages * self._block_tokens, sequence.num_tokens - 1):
            raise Internal(f"{sequence.request_id}: KV of {computed} tokens cannot be in {num_pages} pages")
        self.queues.add(sequence, with_pages=True)
        self._seal(sequence)

    def check_fits(self, sequence: Sequence) -> None:
        """Set the sequence's limit. Raise as `add` does if it could never run."""
        sequence.limit = min(sequence.num_prompt_tokens + sequence.params.max_tokens, self.config.max_seq_tokens)
        if sequence.block_tokens != self._block_tokens:
            raise Internal(f"blocks of {sequence.block_tokens} tokens in pages of {self._block_tokens}")
        if sequence.num_output_tokens >= sequence.params.max_tokens:
            raise Internal(f"request {sequence.request_id} has all its tokens already")
        self.queues.check_new(sequence.request_id)
        if sequence.num_tokens >= self.config.max_seq_tokens:
            raise PromptTooLong(
                f"{sequence.num_tokens} tokens leave no room to answer within {self.config.max_seq_tokens}",
                param="prompt",
            )
        # The last token's KV is never computed; a prefill-only sequence ends after one token.
        end = sequence.num_tokens + 1 if sequence.prefill_only else sequence.limit
        needed = pages_for(end - 1, self._block_tokens)
        if needed > self.pages.num_pages:
            raise NoSpace(f"the request may need {needed} pages and this worker has {self.pages.num_pages}")

    # -- removing requests ---------------------------------------------------------------------------------

    def cancel(self, request_id: str) -> bool:
        """Remove a request in any state and free its pages. Return False if there is no such request; idempotent."""
        sequence = self.queues.sequences.get(request_id)
        if sequence is None:
            return False
        self._remove(sequence)
        self._in_flight.pop(request_id, None)
        self._pulls.pop(request_id, None)
        return True

    def release(self, request_id: str) -> None:
        """Free the pages of a finished sequence that holds them; do nothing otherwise."""
        sequence = self.queues.sequences.get(request_id)
        if sequence is not None and sequence.status is SequenceStatus.HELD:
            self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.request_id in self._ahead:
            self._ahead_free += sequence.pages
        elif self._step_is_open and sequence.status is SequenceStatus.RUNNING:
            self._deferred_free += sequence.pages
        else:
            self.pages.free(sequence.pages)
        sequence.pages = []
        self.ahead.give_back(sequence.request_id)
        self.queues.remove(sequence)

    # -- one step ------------------------------------------------------------------------------------------

    def schedule(self) -> list[Chunk]:
        """Open a step and return its chunks. Empty: nothing can be computed now, and no step is open."""
        if self._step_is_open:
            raise Internal("the last step has not been completed")
        self._plan, self._admitted = {}, []
        if not (self.queues.alone and self._plan_alone()):
            self._plan_batch()
            if self.queues.alone and not self._plan:  # a preemption left a place and pages
                self._plan_alone()
        chunks = [self.queues.sequences[request_id].chunk(n) for request_id, n in self._plan.items()]
        self._in_flight = {chunk.request_id: chunk for chunk in chunks}
        self._step_is_open = bool(chunks)
        return chunks

    def _plan_alone(self) -> bool:
        """Plan a step for one sequence that must run alone. Return False if none of them can run now."""
        for sequence in self.queues.next_alone():
            if sequence.status is SequenceStatus.WAITING:
                if not sequence.pages and not self._allocate_pages(sequence):
                    continue
                self.queues.start(sequence)
            self._plan_tokens(sequence, min(self._budget, sequence.num_uncomputed_tokens))
            return bool(self._plan) or self._plan_alone()  # it was preempted, so another has pages now
        return False

    def _plan_batch(self) -> None:
        num_preemptions = self.num_preemptions
        if self.config.prefill_first:
            self._plan_prompts(num_preemptions)
        if not self._plan:
            self._plan_decodes()
            self._start_adopted()
        if not self.config.prefill_first:
            self._plan_prompts(num_preemptions)

    def _plan_prompts(self, num_preemptions: int) -> None:
        self._plan_prefills()
        if self.num_preemptions == num_preemptions:  # otherwise pages are scarce
            self._admit_waiting()

    @property
    def _budget(self) -> int:
        return self.config.max_batch_tokens - sum(self._plan.values())

    def _plan_decodes(self) -> None:
        for sequence in list(self.queues.running):
            if sequence.status is SequenceStatus.RUNNING and sequence.num_uncomputed_tokens == 1:
                self._plan_tokens(sequence, 1)

    def _start_adopted(self) -> None:
        while (sequence := self._next_adopted()) is not None:
            self.queues.start(sequence)
            if sequence.num_uncomputed_tokens == 1:
                self._plan_tokens(sequence, 1)

    def _next_adopted(self) -> Sequence | None:
        """Return the adopted sequence that gets a place now, which another tenant's may hand over."""
        queues = self.queues
        if not queues.adopted or queues.adopted[0].num_alone_steps:
            return None
        sequence = next_to_start([each for each in queues.adopted if not each.num_alone_steps], queues.running)
        if not queues.has_place:
            other = to_stand_down(sequence, queues.running)
            if other is None:
                return None
            self._plan.pop(other.request_id, None)
            queues.stand_down(other)
        return sequence

    def _plan_prefills(self) -> None:
        for sequence in list(self.queues.running):
            is_decode = self.config.prefill_first and sequence.num_uncomputed_tokens == 1
            if sequence.status is SequenceStatus.RUNNING and sequence.request_id not in self._plan and not is_decode:
                self._plan_tokens(sequence, min(self._budget, sequence.num_uncomputed_tokens))

    def _plan_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        if num_tokens > 0 and self._grow(sequence, num_tokens):
            self._plan[sequence.request_id] = num_tokens

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate pages for the next tokens, preempting other sequences if necessary. Return False if the sequence
        itself is preempted."""
        end = sequence.num_computed_tokens + num_tokens
        needed = max(0, pages_for(end, self._block_tokens) - len(sequence.pages))
        while not self.ahead.make_room(needed, keep=sequence.request_id):
            other = to_preempt(self.queues.running)
            self._preempt(other)
            if other is sequence:
                return False
        sequence.pages += self.pages.allocate(needed)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Free the sequence's pages and queue it again; it goes on, from its tokens and what is still stored of its KV,
        before any later arrival."""
        self.num_preemptions += 1
        self._plan.pop(sequence.request_id, None)
        if sequence.request_id in self._ahead:  # its step writes to its last page
            self._ahead_free.append(sequence.pages.pop())
        self.pages.free(sequence.pages)
        sequence.pages = []
        sequence.num_computed_tokens = sequence.num_sealed_blocks = 0
        sequence.num_pool_blocks = 0  # the pool promised its blocks for the first admission only
        sequence.ahead_limit = NO_LIMIT
        sequence.num_preemptions += 1
        self.queues.requeue(sequence)

    def make_way(self, tenant: str, weight: float, num_wanted: int, num_reserved: int = 0) -> bool:
        """Preempt sequences until `num_wanted` pages are available for a tenant that has `num_reserved` pages beside
        those of its sequences here. Return False, mostly with nothing preempted, if other tenants have too little to
        give. Between two steps only.

        A sequence is preempted for another tenant's sake once, and the earliest one never: so each one ends. Prompts
        whose KV others wait for are spared.
        """
        if self._step_is_open:
            raise Internal("pages are taken from a sequence within a step")
        holders = sorted([*self.queues.running, *self.queues.adopted], key=lambda each: each.arrival)
        taken = shares(holders, num_pages)
        wanted = taken.get(tenant, 0.0) + (num_reserved + num_wanted) / weight
        spared = [each for each in holders if each.was_displaced or each.num_alone_steps or each.prefill_only]
        able = [each for each in holders[1:] if each not in spared]
        for each in to_make_way(able, taken, tenant, wanted, num_wanted - self.pages.num_available):
            each.was_displaced = True
            self._preempt(each)
        return self.pages.num_available >= num_wanted

    def may_pass(self, tenant: str, weight: float, num_wanted: int, num_reserved: int = 0) -> bool:
        """Return whether a tenant may take that many pages before the first of the waiting sequences: only if that
        one's tenant has more than it would have."""
        taken = shares([*self.queues.running, *self.queues.adopted], num_pages)
        first = next(iter(self.queues.waiting), None)
        wanted = taken.get(tenant, 0.0) + (num_reserved + num_wanted) / weight
        return first is None or (first.tenant != tenant and taken.get(first.tenant, 0.0) >= wanted)

    def _admit_waiting(self) -> None:
        while self.queues.waiting and self.queues.has_place and self._budget > 0:
            sequence = self.ahead.first_ready(self.queues.waiting)
            if sequence is None or sequence.num_alone_steps or not self._allocate_pages(sequence):
                return
            self.queues.start(sequence)
            self._plan_tokens(sequence, min(self._budget, sequence.num_uncomputed_tokens))

    def has_room(self, sequence: Sequence) -> bool:
        """Return whether there are pages for those tokens of a waiting sequence whose KV is neither here nor on its
        way. One page per running sequence stays free, so that the new sequence is not preempted at once."""
        num_local = self.pages.count_local(sequence.keys[: sequence.num_reusable_blocks])
        return self._make_room(sequence, max(num_local, self.ahead.end_of(sequence.request_id)))

    def _make_room(self, sequence: Sequence, num_here: int) -> bool:
        missing = pages_for(sequence.num_tokens, self._block_tokens) - num_here + len(self.queues.running)
        return self.ahead.make_room(missing, keep=sequence.request_id)

    def _allocate_pages(self, sequence: Sequence) -> bool:
        """Allocate all pages that the sequence's tokens need, reused or new. Return False if there are too few, or if
        the sequence has to wait for its pull."""
        name = sequence.request_id
        if self.ahead.is_awaited(name) or self.ahead.lacks_pages(name) or not self.has_room(sequence):
            return False
        pull = self.ahead.joinable(name)
        if pull is not None:
            if not self._make_room(sequence, self.ahead.end_of(name)):  # more blocks may be here than the pull brings
                return False
            self._admit(sequence, self.ahead.join(pull), pull.wanted, pull.num_before)
            return True
        local = self.pages.match(sequence.keys[: sequence.num_reusable_blocks])
        if not self._make_room(sequence, len(local)):  # reused pages that were cached are no longer available
            self.pages.free(local)
            return False
        self._admit(sequence, local, AdmittedSequence(name, len(local), (), (), ()), self.ahead.give_back(name))
        return True

    def _admit(self, sequence: Sequence, here: list[int], entry: AdmittedSequence, num_ahead: int) -> None:
        """Give the sequence the pages of blocks that are here or on their way, and new ones for its other tokens."""
        total = pages_for(sequence.num_tokens, self._block_tokens)
        sequence.pages = here + self.pages.allocate(total - len(here))
        sequence.num_sealed_blocks = entry.num_local_blocks
        sequence.num_computed_tokens = len(here) * self._block_tokens
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        entry = msgspec.structs.replace(entry, num_ahead_blocks=min(num_ahead, entry.num_local_blocks))
        self._admitted.append(entry)
        if entry.blocks:
            self._pulls[sequence.request_id] = entry

    def drain_admitted(self) -> list[AdmittedSequence]:
        """Return the sequences that entered the batch with the last schedule(), and which of their blocks are still on
        their way."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def confirm_pulled(self, request_id: str) -> None:
        """Accept the pulled pages as verified. Do nothing if the request is gone."""
        pull = self._pulls.pop(request_id, None)
        if pull is not None:
            self._seal(self.queues.sequences[request_id], end=pull.blocks[-1] + 1)
            self.ahead.give_back(request_id)

    def put_back(self, request_id: str) -> None:
        """Take a sequence whose pull is still under way out of the open step: it waits, in order of arrival, until the
        pull is over. The pull's pages stay reserved. Do nothing if the request is gone."""
        if self._pulls.pop(request_id, None) is None:
            return
        sequence = self.queues.sequences[request_id]
        self._in_flight.pop(request_id, None)
        self._deferred_free += sequence.pages
        sequence.pages = []
        sequence.num_computed_tokens = sequence.num_sealed_blocks = 0
        self.ahead.leave(request_id)
        self.queues.requeue(sequence)

    def rewind(self, request_id: str, num_computed_tokens: int) -> None:
        """Discard KV from this position on; it is computed again in the same pages.

        The open step's token for this sequence is dropped. Pulled blocks that end before the position count as
        verified, and sealed blocks stay; the pull must be over. Do nothing if the request is gone or finished.
        """
        sequence = self.queues.sequences.get(request_id)
        if sequence is None or sequence.status is SequenceStatus.HELD:
            return
        self._in_flight.pop(request_id, None)
        pull = self._pulls.pop(request_id, None)
        if pull is not None:
            self._seal(sequence, end=min(pull.blocks[-1] + 1, num_computed_tokens // self._block_tokens))
            self.ahead.give_back(request_id)
        floor = sequence.num_sealed_blocks * self._block_tokens
        sequence.num_computed_tokens = max(floor, min(num_computed_tokens, sequence.num_computed_tokens))
        sequence.num_cached_tokens = min(sequence.num_cached_tokens, sequence.num_computed_tokens)

    def is_in_flight(self, request_id: str) -> bool:
        """Return whether the open step's outcome still counts for this request."""
        return request_id in self._in_flight

    def look_ahead(self) -> list[Chunk]:
        """Return the step that will follow the open one, for launching it before the open step's tokens are known.

        It has the decodes of the open step, one token further; its tokens are UNKNOWN_TOKEN. Sequences that reach their
        last token in the open step are left out; another one may end by a stop token, and is then computed in vain.
        Empty if the next step may hold anything else, or if there are too few pages.

        Pages of a sequence that ends meanwhile are freed by `settle_ahead`, because the launched step writes to them.
        """
        queues, flight = self.queues, self._in_flight
        may_admit = queues.has_place and bool(queues.waiting or queues.adopted)
        if queues.alone or may_admit or self._pulls or len(flight) != len(queues.running) or self._ahead:
            return []
        if any(len(chunk.tokens) != 1 or not chunk.wants_logits for chunk in flight.values()):
            return []
        going_on = [s for s in queues.running if s.num_tokens + 1 < s.limit and not s.prefill_only]
        missing = [max(0, pages_for(s.num_tokens + 1, self._block_tokens) - len(s.pages)) for s in going_on]
        if sum(missing) + len(going_on) > self.pages.num_available:
            return []
        for sequence, number in zip(going_on, missing, strict=True):
            sequence.pages += self.pages.allocate(number)
        self._ahead = {s.request_id for s in going_on}
        return [Chunk(s.request_id, s.num_tokens, (UNKNOWN_TOKEN,), tuple(s.pages), True) for s in going_on]

    def settle_ahead(self) -> None:
        """The step that was launched ahead is over, used or not: free the pages of sequences that ended meanwhile."""
        self._ahead = set()
        self.pages.free(self._ahead_free)
        self._ahead_free = []

    def complete(self, sampled: Mapping[str, int]) -> StepResult:
        """Close the step. `sampled` has a token for every chunk in flight that wanted logits; tokens of other requests
        (cancelled or rewound) are ignored."""
        if self._pulls:
            raise Internal(f"pulls that are not settled: {sorted(self._pulls)}")
        wanting = [c.request_id for c in self._in_flight.values() if c.wants_logits]
        if not sampled.keys() >= set(wanting):
            raise Internal(f"no token for {sorted(set(wanting) - sampled.keys())}")
        result, in_flight = StepResult(), self._in_flight
        self._close_step()
        for chunk in in_flight.values():
            sequence = self.queues.sequences[chunk.request_id]
            sequence.num_computed_tokens = chunk.end
            if sequence.num_alone_steps:
                self.queues.count_alone_step(sequence)
            self._add_full_blocks(result, sequence, self._seal(sequence))
            if chunk.wants_logits:
                result.accepted.append(self._accept(sequence, sampled[chunk.request_id]))
        return result

    def abandon_step(self) -> None:
        """Close a step that failed, as if it had not been computed."""
        for request_id in list(self._pulls):
            self.put_back(request_id)
        self._close_step()

    def _close_step(self) -> None:
        self._in_flight, self._step_is_open = {}, False
        self.pages.free(self._deferred_free)
        self._deferred_free = []

    def _seal(self, sequence: Sequence, end: int | None = None) -> range:
        """Publish the blocks completed since the last call, up to block `end` (default: all computed blocks). Return
        their indices."""
        first = sequence.num_sealed_blocks
        end = sequence.num_computed_tokens // self._block_tokens if end is None else end
        if end > first:
            self.pages.publish(sequence.pages[first:end], sequence.keys[first:end])
            sequence.num_sealed_blocks = end
        return range(first, end)

    def _add_full_blocks(self, result: StepResult, sequence: Sequence, indices: range) -> None:
        result.full_blocks.extend(full_blocks(sequence, indices))

    def _accept(self, sequence: Sequence, token: int) -> Accepted:
        reason = self.end_reason(sequence, token)
        sequence.append(token)
        if reason is not None:
            self._finish(sequence)
        return Accepted(sequence.request_id, token, reason, sequence.num_cached_tokens)

    def end_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Return why the sequence ends with this token as its next one; None: it goes on."""
        if self._ends(sequence, token):
            return "stop"
        if sequence.num_tokens + 1 >= sequence.limit:
            return "length"
        return "handoff" if sequence.prefill_only else None

    def _finish(self, sequence: Sequence) -> None:
        if sequence.hold_pages:
            self.queues.hold(sequence)
        else:
            self._remove(sequence)

    def _ends(self, sequence: Sequence, token: int) -> bool:
        params = sequence.params
        if sequence.num_output_tokens < params.min_tokens:
            return False
        return token in params.stop_token_ids or (not params.ignore_eos and token in self.config.eos_token_ids)

    def barred_tokens(self, sequence: Sequence, num_ahead: int = 0) -> frozenset[int]:
        """Return the tokens that must not be sampled after the next `num_ahead`: those that would end the sequence
        before its min_tokens."""
        if sequence.num_output_tokens + num_ahead >= sequence.params.min_tokens:
            return frozenset()
        own = frozenset(sequence.params.stop_token_ids)
        return own if sequence.params.ignore_eos else own | self.config.eos_token_ids

    # -- queries -------------------------------------------------------------------------------------------

    def get(self, request_id: str) -> Sequence | None:
        """Return the sequence, for reading only; None if it is gone."""
        return self.queues.sequences.get(request_id)

    def has_work(self) -> bool:
        return self.queues.num_waiting + self.queues.num_running > 0

    def check_integrity(self) -> None:
        """Assert that pages, queues and progress agree; fast enough for a test to call after every event."""
        self.queues.check_integrity()
        sequences = self.queues.sequences.values()
        leaving = self._deferred_free + self._ahead_free
        self.pages.check_integrity(Counter([page for s in sequences for page in s.pages] + leaving))
        assert self._in_flight.keys() <= {s.request_id for s in self.queues.running}
        assert self._step_is_open or not (self._in_flight or self._pulls or self._deferred_free)
        for sequence in sequences:
            self._check_sequence(sequence)

    def _check_sequence(self, sequence: Sequence) -> None:
        assert len(set(sequence.pages)) == len(sequence.pages), "a page twice in one sequence"
        assert sequence.num_uncomputed_tokens > 0, "nothing left to compute"
        assert sequence.num_computed_tokens <= len(sequence.pages) * self._block_tokens
        assert sequence.num_sealed_blocks * self._block_tokens <= sequence.num_computed_tokens
        assert len(sequence.keys) == sequence.num_tokens // self._block_tokens
