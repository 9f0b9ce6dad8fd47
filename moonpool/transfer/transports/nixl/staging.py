"""Staging memory between the caller's memory and the wire, registered once; and how a transfer is cut to fit into it.

NIXL cannot cancel a transfer, so it never gets the caller's memory: when a deadline passes, late bytes arrive in
staging memory, and the slot is used again only when its transfer has ended. Copying costs about as much as registering
the caller's memory for each call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from moonpool.base.clock import Deadline
from moonpool.transfer.memory.buffers import address_of, aligned_buffer
from moonpool.transfer.memory.fence import Spans, extend_spans
from moonpool.transfer.transports.nixl.agent import Agent, Memory

MAX_SPANS = 4096  # per chunk; beyond that NIXL's own work per descriptor is all there is to win from


@dataclass
class StagedChunk:
    """Bytes that lie one after the other in staging memory: where they are the caller's, and where the owner's."""

    views: list[memoryview] = field(default_factory=list)
    spans: Spans = field(default_factory=list)
    nbytes: int = 0

    def add(self, offset: int, view: memoryview) -> None:
        self.views.append(view)
        self.nbytes += view.nbytes
        extend_spans(self.spans, offset, view.nbytes)


def cut_chunks(
    placed: Iterable[tuple[int, memoryview]], max_nbytes: int, max_spans: int = MAX_SPANS
) -> Iterator[StagedChunk]:
    """All bytes in order, in chunks that are full but for the last one; an item may be cut anywhere."""
    chunk = StagedChunk()
    for offset, view in placed:
        at = 0
        while at < view.nbytes:
            if chunk.nbytes == max_nbytes or len(chunk.spans) == max_spans:
                yield chunk
                chunk = StagedChunk()
            part = view[at : at + max_nbytes - chunk.nbytes]
            chunk.add(offset + at, part)
            at += part.nbytes
    if chunk.nbytes:
        yield chunk


class Slot:
    """A piece of registered memory. Whoever took it has it alone."""

    def __init__(self, agent: Agent, nbytes: int) -> None:
        self.memory = aligned_buffer(nbytes)
        self.address = address_of(self.memory)
        agent.register(Memory(self.address, nbytes))


class Staging:
    """At most `max_slots` of `slot_nbytes`, made when first wanted. Thread-safe."""

    def __init__(self, agent: Agent, slot_nbytes: int, max_slots: int) -> None:
        self.slot_nbytes = slot_nbytes
        self._agent = agent
        self._max_slots = max_slots
        self._changed = threading.Condition()
        self._made: list[Slot] = []
        self._free: list[Slot] = []

    def take(self, timeout_s: float = 0.0) -> Slot | None:
        """None when none comes free in time."""
        deadline = Deadline(timeout_s)
        with self._changed:
            while (slot := self._take_now()) is None:
                if not self._changed.wait(deadline.remaining_s()):
                    break
            return slot

    def give_back(self, slot: Slot) -> None:
        """Only when no transfer touches it any more."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def clear(self) -> None:
        """Frees the memory; the agent must be gone."""
        with self._changed:
            self._made.clear()
            self._free.clear()

    def _take_now(self) -> Slot | None:
        if not self._free and len(self._made) < self._max_slots:
            self._made.append(Slot(self._agent, self.slot_nbytes))
            return self._made[-1]
        return self._free.pop() if self._free else None
