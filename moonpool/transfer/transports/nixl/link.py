"""The asking side of the nixl transport: one agent, its staging memory, and what is in the air.

Bytes move in chunks, a few at a time, so that copying and sending overlap. A chunk that did not end in time stays in
the air with its slot: it is looked after until it ends, and nothing else is asked of its peer before that. So a write
that was given up never lands on top of a later one of this process.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from moonpool.base.clock import Deadline
from moonpool.base.errors import DeadlineExceeded, PeerLost
from moonpool.transfer.memory.buffers import copy_bytes
from moonpool.transfer.transports.nixl.agent import Agent, NixlOp
from moonpool.transfer.transports.nixl.peer import NixlAddress, NixlPeer, SlotTransfer
from moonpool.transfer.transports.nixl.staging import Slot, StagedChunk, Staging

SLOT_NBYTES = 4 * 1024 * 1024
MAX_SLOTS = 16
_FLIGHTS_PER_CALL = 2
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3
_PAUSE_GROWTH = 1.2
_WATCH_INTERVAL_S = 0.5
_CLOSE_TIMEOUT_S = 5.0

Watch = Callable[[Deadline], None]  # raises when the owner is gone


class NixlLink:
    """Thread-safe. `slot_nbytes` is the largest piece that moves at once."""

    def __init__(self, *, loopback_only: bool, slot_nbytes: int = SLOT_NBYTES, max_slots: int = MAX_SLOTS) -> None:
        self._agent = Agent(loopback_only=loopback_only)
        self._staging = Staging(self._agent, slot_nbytes, max_slots)
        self._changed = threading.Condition()
        self._abandoned: list[SlotTransfer] = []
        self._num_users = 0
        self._closed = False

    @property
    def slot_nbytes(self) -> int:
        return self._staging.slot_nbytes

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keeps the agent until the block ends; PeerLost when it is closed."""
        with self._changed:
            if self._closed:
                raise PeerLost("this nixl transport is closed")
            self._num_users += 1
        try:
            yield
        finally:
            self._leave()

    def connect(self, address: NixlAddress) -> NixlPeer:
        return NixlPeer(self._agent, address)

    def move(self, peer: NixlPeer, op: NixlOp, chunks: Iterable[StagedChunk], deadline: Deadline, watch: Watch) -> None:
        """Carries out all chunks, or raises with none of the callers' memory in NIXL's hands. Call it in_use()."""
        self._settle(peer, deadline, watch)
        in_air: deque[tuple[SlotTransfer, StagedChunk]] = deque()
        try:
            for chunk in chunks:
                slot = self._next_slot(op, in_air, deadline, watch)
                in_air.append((self._launch(peer, op, slot, chunk), chunk))
            while in_air:
                self._land_first(op, in_air, deadline, watch)
        finally:
            self._abandon([flight for flight, _ in in_air])

    def close(self) -> None:
        """Idempotent. Transfers under way end with PeerLost, those given up are dropped with the agent."""
        with self._changed:
            self._closed = True
            if not self._num_users:
                self._tear_down()
            self._changed.wait_for(lambda: not self._num_users, _CLOSE_TIMEOUT_S)

    def _leave(self) -> None:
        with self._changed:
            self._num_users -= 1
            if self._closed and not self._num_users:
                self._tear_down()
            self._changed.notify_all()

    def _tear_down(self) -> None:
        """The agent goes before the memory it may still be writing to, and after its last transfer."""
        self._agent.close()
        for flight in self._abandoned:
            flight.drop()
        self._abandoned.clear()
        self._staging.clear()

    def _next_slot(
        self, op: NixlOp, in_air: deque[tuple[SlotTransfer, StagedChunk]], deadline: Deadline, watch: Watch
    ) -> Slot:
        """Waits for slots of others only while holding none, so that no two calls wait for each other."""
        while in_air:
            slot = self._staging.take() if len(in_air) < _FLIGHTS_PER_CALL else None
            if slot is not None:
                return slot
            self._land_first(op, in_air, deadline, watch)
        while (slot := self._staging.take(_LONGEST_PAUSE_S)) is None:
            self._reap()
            self._check(deadline)
        return slot

    def _launch(self, peer: NixlPeer, op: NixlOp, slot: Slot, chunk: StagedChunk) -> SlotTransfer:
        try:
            if op is NixlOp.WRITE:
                _gather(slot.memory, chunk)
            return peer.start(op, slot, chunk)
        except BaseException:
            self._staging.give_back(slot)
            raise

    def _land_first(
        self, op: NixlOp, in_air: deque[tuple[SlotTransfer, StagedChunk]], deadline: Deadline, watch: Watch
    ) -> None:
        flight, chunk = in_air[0]
        self._wait(flight.landed, deadline, watch)
        in_air.popleft()
        if op is NixlOp.READ:
            _scatter(chunk, flight.slot.memory)
        self._staging.give_back(flight.slot)

    def _settle(self, peer: NixlPeer, deadline: Deadline, watch: Watch) -> None:
        """Waits until nothing that was given up is in the air with this peer."""
        self._wait(lambda: self._reap(peer), deadline, watch)

    def _reap(self, peer: NixlPeer | None = None) -> bool:
        """Takes back the slots of what has ended; whether nothing of `peer` is left."""
        with self._changed:
            ended = [flight for flight in self._abandoned if _is_over(flight)]
            self._abandoned = [flight for flight in self._abandoned if flight not in ended]
            clear = all(flight.peer is not peer for flight in self._abandoned)
        for flight in ended:
            self._staging.give_back(flight.slot)
        return clear

    def _abandon(self, flights: list[SlotTransfer]) -> None:
        with self._changed:
            self._abandoned.extend(flights)
        if flights:
            self._reap()

    def _wait(self, ended: Callable[[], bool], deadline: Deadline, watch: Watch) -> None:
        """Looks often at first, ever more rarely later, and now and then for the owner's pulse."""
        pause_s, watched = _FIRST_PAUSE_S, Deadline(_WATCH_INTERVAL_S)
        while not ended():
            self._check(deadline)
            if watched.expired():
                watch(deadline)
                watched = Deadline(_WATCH_INTERVAL_S)
            time.sleep(pause_s)
            pause_s = min(pause_s * _PAUSE_GROWTH, _LONGEST_PAUSE_S)

    def _check(self, deadline: Deadline) -> None:
        if self._closed:
            raise PeerLost("this nixl transport is closed")
        if deadline.expired():
            raise DeadlineExceeded("the transfer over nixl did not end in time")


def _is_over(flight: SlotTransfer) -> bool:
    try:
        return flight.landed()
    except PeerLost:
        return True


def _gather(target: memoryview, chunk: StagedChunk) -> None:
    at = 0
    for view in chunk.views:
        copy_bytes(target[at : at + view.nbytes], view)
        at += view.nbytes


def _scatter(chunk: StagedChunk, source: memoryview) -> None:
    at = 0
    for view in chunk.views:
        copy_bytes(view, source[at : at + view.nbytes])
        at += view.nbytes
