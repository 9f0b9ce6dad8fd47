"""What drives a simulated world: events and flows of bytes on one virtual clock. Pure, and the same every time.

Whoever waits gives a function without arguments. At one moment flows end before events happen, in the order in which
they were started. Over links that are cut nothing arrives: whoever gave a function for that case hears of it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence

from moonpool.sim.physics.events import EventQueue, Handle
from moonpool.sim.physics.links import Network

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
