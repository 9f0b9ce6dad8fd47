"""The scheduler's queues: waiting, running and held sequences, in order of arrival. Pure.

Every sequence that is not gone is in exactly one of them, which its status names.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable

from moonpool.base.cluster import WorkerLoad
from moonpool.base.errors import AlreadyExists
from moonpool.engine.sequence import Sequence, SequenceStatus, pages_for


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


class SequenceQueues:
    """At most `max_num_seqs` sequences run at once. Callers read the lists; only the methods change them."""

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.sequences: dict[str, Sequence] = {}  # all of them, by request id
        self.waiting: list[Sequence] = []  # by arrival; they hold no pages
        self.adopted: list[Sequence] = []  # waiting with their pages, by arrival
        self.running: list[Sequence] = []  # by arrival
        self.alone: dict[str, Sequence] = {}  # waiting or running; next computed in a batch of one
        self._next_arrival = 0

    def check_new(self, request_id: str) -> None:
        if request_id in self.sequences:
            raise AlreadyExists(f"request {request_id} is here already")

    def add(self, sequence: Sequence, *, with_pages: bool = False) -> None:
        """Append a new sequence to the waiting ones. Raise AlreadyExists if its id is here."""
        self.check_new(sequence.request_id)
        sequence.arrival = self._next_arrival
        self._next_arrival += 1
        sequence.status = SequenceStatus.WAITING
        self.sequences[sequence.request_id] = sequence
        if sequence.num_alone_steps:
            self.alone[sequence.request_id] = sequence
        (self.adopted if with_pages else self.waiting).append(sequence)

    def start(self, sequence: Sequence) -> None:
        """Move a sequence from waiting to running."""
        self._dequeue(sequence)
        insort(self.running, sequence, key=_arrival)
        sequence.status = SequenceStatus.RUNNING

    def requeue(self, sequence: Sequence) -> None:
        """Move a preempted sequence from running to waiting, before all later arrivals."""
        self._dequeue(sequence)
        insort(self.waiting, sequence, key=_arrival)
        sequence.status = SequenceStatus.WAITING

    def stand_down(self, sequence: Sequence) -> None:
        """Move a sequence from running to waiting; it keeps its pages."""
        self._dequeue(sequence)
        insort(self.adopted, sequence, key=_arrival)
        sequence.status = SequenceStatus.WAITING

    def hold(self, sequence: Sequence) -> None:
        """Move a finished sequence from running to held: it keeps its pages until they are released."""
        self._dequeue(sequence)
        self.alone.pop(sequence.request_id, None)
        sequence.status = SequenceStatus.HELD

    def remove(self, sequence: Sequence) -> None:
        self._dequeue(sequence)
        self.alone.pop(sequence.request_id, None)
        del self.sequences[sequence.request_id]
        sequence.status = SequenceStatus.GONE

    def isolate(self, request_ids: Iterable[str]) -> None:
        """Have the next step of each of these requests computed in a batch of one; ignore those that are gone."""
        for request_id in request_ids:
            sequence = self.sequences.get(request_id)
            if sequence is not None and sequence.status is not SequenceStatus.HELD:
                sequence.num_alone_steps = max(sequence.num_alone_steps, 1)
                self.alone[request_id] = sequence

    def count_alone_step(self, sequence: Sequence) -> None:
        """Count one step of the sequence that was computed in a batch of one."""
        sequence.num_alone_steps -= 1
        if not sequence.num_alone_steps:
            del self.alone[sequence.request_id]

    def next_alone(self) -> list[Sequence]:
        """Return the sequences that could now be computed in a batch of one: running ones first, then by arrival."""
        able = [s for s in self.alone.values() if s.status is SequenceStatus.RUNNING or self.has_place]
        return sorted(able, key=lambda s: (s.status is not SequenceStatus.RUNNING, s.arrival))

    def _dequeue(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING and sequence in self.adopted:
            self.adopted.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)

    @property
    def has_place(self) -> bool:
        return len(self.running) < self.max_num_seqs

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.adopted)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to compute until all sequences here decode, without reuse: the length of the queue."""
        prefilling = sum([count for s in self.running if (count := s.num_uncomputed_tokens) > 1])
        return prefilling + sum([s.num_tokens for s in self.waiting])

    def load(self, free_pages: int) -> WorkerLoad:
        """Return the load that a worker with these queues and free pages reports."""
        return WorkerLoad(
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            waiting_tokens=self.num_waiting_tokens,
            running_tokens=sum([each.num_computed_tokens for each in self.running]),
            free_pages=free_pages,
            waiting_pages=sum([pages_for(each.num_tokens, each.block_tokens) for each in self.waiting]),
        )

    def check_integrity(self) -> None:
        held = [s for s in self.sequences.values() if s.status is SequenceStatus.HELD]
        places = Counter(id(s) for s in [*self.waiting, *self.adopted, *self.running, *held])
        assert places == Counter(id(s) for s in self.sequences.values()), "a sequence is nowhere or twice"
        assert all(s.status is SequenceStatus.RUNNING for s in self.running)
        assert all(s.status is SequenceStatus.WAITING for s in [*self.waiting, *self.adopted])
        assert not any(s.pages for s in self.waiting), "a sequence waits with pages"
        assert len(self.running) <= self.max_num_seqs
        unfinished = [s for s in self.sequences.values() if s.status is not SequenceStatus.HELD]
        assert self.alone == {s.request_id: s for s in unfinished if s.num_alone_steps}
        assert self.waiting == sorted(self.waiting, key=_arrival)
        assert self.adopted == sorted(self.adopted, key=_arrival)
        assert self.running == sorted(self.running, key=_arrival)
