"""Memory of our own between the caller's and the wire, registered once.

A transfer that NIXL was given cannot be taken back, so the caller's memory is never given to it: when a deadline
passes, late bytes land here, and the slot is used again only when its transfer has ended. Copying costs about what
registering the caller's memory for each call would.
"""

from __future__ import annotations

import threading

from moonpool.base.clock import Deadline
from moonpool.transfer.memory.buffers import address_of, aligned_buffer
from moonpool.transfer.transports.nixl.agent import Agent, Memory


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
