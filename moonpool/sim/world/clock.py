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

# [time, order, payload]: a list, so that `cancel` can replace the payload. No two orders are equal, so payloads are
# never compared.
Handle = list[Any]

_CANCELLED = object()
_REBUILD_FROM = 64


class EventQueue(Generic[T]):
    """A priority queue of events by time."""

    __slots__ = ("_entries", "_num_cancelled", "_num_put", "now_s")

    def __init__(self) -> None:
        self._entries: list[Handle] = []
        self._num_put = 0
        self._num_cancelled = 0
        self.now_s = 0.0  # the time of the latest event popped

    def put(self, time_s: float, payload: T) -> Handle:
        """Add an event. Return its handle, with which it can be cancelled. InvalidInput for a time in the past."""
        if not time_s >= self.now_s:
            raise InvalidInput(f"an event at {time_s} s, when it is {self.now_s} s already")
        self._num_put = order = self._num_put + 1
        entry = [time_s, order, payload]
        heappush(self._entries, entry)
        return entry

    def cancel(self, handle: Handle) -> None:
        """Cancel an event. An event that has run or was cancelled already is left alone."""
        if handle[2] is _CANCELLED:
            return
        handle[2] = _CANCELLED
        self._num_cancelled += 1
        if self._num_cancelled > _REBUILD_FROM and 2 * self._num_cancelled > len(self._entries):
            self._rebuild()

    def pop(self) -> tuple[float, T] | None:
        """Remove the next event and move the time to it. Return its time and payload; None if the queue is empty."""
        entries = self._entries
        while entries:
            entry = heappop(entries)
            payload = entry[2]
            if payload is not _CANCELLED:
                entry[2] = _CANCELLED  # so that a later cancel() of this handle does nothing
                self.now_s = time_s = entry[0]
                return time_s, payload
            self._num_cancelled -= 1
        return None

    def next_s(self) -> float | None:
        """Return the time of the next event; None if the queue is empty."""
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

    def _rebuild(self) -> None:
        self._entries = [entry for entry in self._entries if entry[2] is not _CANCELLED]
        heapify(self._entries)
        self._num_cancelled = 0


Callback = Callable[[], object]


class _FlowCallbacks:
    """The tag of a flow whose sender also wants to know when the flow is lost."""

    __slots__ = ("_on_arrival", "on_lost")

    def __init__(self, on_arrival: Callback, on_lost: Callback) -> None:
        self._on_arrival, self.on_lost = on_arrival, on_lost

    def __call__(self) -> None:
        self._on_arrival()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Switch the cyclic garbage collector off. A run makes no reference cycles but millions of live objects, so the
    collector would take a twentieth of the time or more and find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class SimClock:
    """Runs callbacks at their simulated times: timers (`call_at`) and ends of flows (`send`)."""

    def __init__(self, network: Network) -> None:
        self.now_s = 0.0
        self.network = network
        self._events: EventQueue[Callback] = EventQueue()
        self._failed: set[str] = set()  # names of links

    @property
    def is_idle(self) -> bool:
        """Whether no event and no flow is left, so that the run ends."""
        return not len(self._events) and self.network.next_end() is None

    def call_at(self, time_s: float, callback: Callback) -> Handle:
        """Call `callback` at that time, or now if that time has passed. Return a handle for `cancel`."""
        return self._events.put(max(time_s, self.now_s), callback)

    def cancel(self, handle: Handle) -> None:
        self._events.cancel(handle)

    def send(
        self, route: tuple[str, ...], nbytes: float, on_arrival: Callback, on_lost: Callback | None = None
    ) -> None:
        """Start a flow over the links of `route`. Call `on_arrival` when it ends, `on_lost` if a link fails."""
        if self._failed and not self._failed.isdisjoint(route):
            if on_lost is not None:
                self.call_at(self.now_s, on_lost)
            return
        self.network.start(
            self.now_s, route, nbytes, on_arrival if on_lost is None else _FlowCallbacks(on_arrival, on_lost)
        )

    def fail_links(self, links: Sequence[str]) -> None:
        """Drop the flows over these links, and all further flows until `restore_links`."""
        self._failed.update(links)
        lost = [flow.tag for link in links for flow in self.network.fail(self.now_s, link)]
        for tag in lost:
            if isinstance(tag, _FlowCallbacks):
                tag.on_lost()

    def restore_links(self, links: Sequence[str]) -> None:
        self._failed.difference_update(links)
        for link in links:
            self.network.restore(self.now_s, link)

    def run(self, progress: Callable[[float], None] | None = None) -> None:
        """Run until no event and no flow is left. `progress` is called with the time every 4096 events."""
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
