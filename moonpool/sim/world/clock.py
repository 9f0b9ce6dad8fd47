"""The simulated clock: an event queue and the network's flows, both on virtual time. Pure and deterministic.

Events at the same time run in the order in which they were added. A cancelled event stays in the heap, marked, and is
skipped later; when more than half of the heap is cancelled, the heap is rebuilt. At equal times flows end before events
run, in the order in which the flows were started. Data sent over a failed link never arrives; the sender's `on_lost`
callback is called instead.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

from moonpool.base.errors import InvalidInput
from moonpool.sim.physics.links import Network

T = TypeVar("T")

# [time, order, payload]: a list, so that it can be emptied; two never compare as far as their payload.
Handle = list[Any]

_CANCELLED = object()
_SWEEP_FROM = 64


class EventQueue(Generic[T]):
    """What is to happen when."""

    __slots__ = ("_entries", "_num_cancelled", "_num_put", "now_s")

    def __init__(self) -> None:
        self._entries: list[Handle] = []
        self._num_put = 0
        self._num_cancelled = 0
        self.now_s = 0.0  # the time of the latest event popped

    def put(self, time_s: float, payload: T) -> Handle:
        """Something is to happen then. Keep what is returned to cancel it."""
        if not time_s >= self.now_s:
            raise InvalidInput(f"an event at {time_s} s, when it is {self.now_s} s")
        self._num_put = order = self._num_put + 1
        entry = [time_s, order, payload]
        heappush(self._entries, entry)
        return entry

    def cancel(self, handle: Handle) -> None:
        """It will not happen. What has happened or was cancelled is left alone."""
        if handle[2] is _CANCELLED:
            return
        handle[2] = _CANCELLED
        self._num_cancelled += 1
        if self._num_cancelled > _SWEEP_FROM and 2 * self._num_cancelled > len(self._entries):
            self._sweep()

    def pop(self) -> tuple[float, T] | None:
        """The next event and its time, to which the clock moves; None when there is none."""
        entries = self._entries
        while entries:
            entry = heappop(entries)
            payload = entry[2]
            if payload is not _CANCELLED:
                entry[2] = _CANCELLED  # a handle kept beyond its event cancels nothing
                self.now_s = time_s = entry[0]
                return time_s, payload
            self._num_cancelled -= 1
        return None

    def next_s(self) -> float | None:
        """When the next event is."""
        entries = self._entries
        while entries:
            if entries[0][2] is not _CANCELLED:
                time_s: float = entries[0][0]
                return time_s
            heappop(entries)
            self._num_cancelled -= 1
        return None

    def __len__(self) -> int:
        return len(self._entries) - self._num_cancelled

    def _sweep(self) -> None:
        self._entries = [entry for entry in self._entries if entry[2] is not _CANCELLED]
        heapify(self._entries)
        self._num_cancelled = 0


Callback = Callable[[], None]


class _Errand:
    """A flow's tag, where somebody wants to know also when it does not arrive."""

    __slots__ = ("act", "lost")

    def __init__(self, act: Callback, lost: Callback) -> None:
        self.act, self.lost = act, lost

    def __call__(self) -> None:
        self.act()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A world makes no cycles as it goes, and millions of objects that live: looking for garbage among them takes a
    twentieth of the time and more, and finds none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class SimTimers:
    def __init__(self, network: Network) -> None:
        self.now_s = 0.0
        self.network = network
        self._events: EventQueue[Callback] = EventQueue()
        self._cut: set[str] = set()  # links

    @property
    def is_idle(self) -> bool:
        """Whether no event and no flow is left, so that the run ends."""
        return not len(self._events) and self.network.next_end() is None

    def at(self, time_s: float, act: Callback) -> Handle:
        """`act` will be called then."""
        return self._events.put(max(time_s, self.now_s), act)

    def cancel(self, handle: Handle) -> None:
        self._events.cancel(handle)

    def send(self, route: tuple[str, ...], nbytes: float, act: Callback, lost: Callback | None = None) -> None:
        """`act` will be called when so many bytes have gone that way, `lost` if they cannot."""
        if self._cut and not self._cut.isdisjoint(route):
            if lost is not None:
                self.at(self.now_s, lost)
            return
        self.network.start(self.now_s, route, nbytes, act if lost is None else _Errand(act, lost))

    def cut(self, links: Sequence[str]) -> None:
        """Nothing more goes over them; what was on its way is lost."""
        self._cut.update(links)
        lost = [flow.tag for link in links for flow in self.network.fail(self.now_s, link)]
        for tag in lost:
            if isinstance(tag, _Errand):
                tag.lost()

    def mend(self, links: Sequence[str]) -> None:
        self._cut.difference_update(links)
        for link in links:
            self.network.restore(self.now_s, link)

    def run(self, progress: Callable[[float], None] | None = None) -> None:
        """Until nothing is to happen any more. `progress` hears the time now and then."""
        with _no_collection():
            self._run(progress)

    def _run(self, progress: Callable[[float], None] | None) -> None:
        events, network = self._events, self.network
        num_steps = 0
        while True:
            event_s, flow = events.next_s(), network.next_end()
            if flow is not None and (event_s is None or flow[0] <= event_s):
                self.now_s = flow[0]
                for ended in network.advance(flow[0]):
                    assert callable(ended.tag)
                    ended.tag()
            elif event_s is not None:
                self.now_s = event_s
                event = events.pop()
                assert event is not None
                event[1]()
            else:
                return
            num_steps += 1
            if progress is not None and not num_steps & 4095:
                progress(self.now_s)
