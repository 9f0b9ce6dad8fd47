"""A trace's requests, each at its time. Only the next one stands in the event queue: a long queue is a slow one."""

from __future__ import annotations

from collections.abc import Callable

from moonpool.sim.world.timers import SimTimers
from moonpool.traces.columns import Trace, TraceRequest


def follow(clock: SimTimers, trace: Trace, arrived: Callable[[int, TraceRequest], None]) -> None:
    """`arrived` hears of each request and its row when the clock has come to it."""
    requests = enumerate(iter(trace))

    def wait_for_next() -> None:
        entry = next(requests, None)
        if entry is not None:
            clock.at(entry[1].arrival_s, lambda: now(*entry))

    def now(number: int, request: TraceRequest) -> None:
        arrived(number, request)
        wait_for_next()

    wait_for_next()
