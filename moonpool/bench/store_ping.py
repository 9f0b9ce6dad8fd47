"""How long the master keeps a caller waiting: one small question every millisecond, beside whatever else goes on.

The caller asks for a real-time priority, and keeps out of the garbage collector, so that what is measured is the
master and not the caller's own turn on its processor.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from moonpool.base.errors import MoonpoolError, Unavailable
from moonpool.base.rpc import BlockingClient
from moonpool.bench.store_calls import block_key
from moonpool.store import messages as m

_EVERY_S = 0.001
_NOTED_S = 0.002  # waits above it are remembered one by one
_TIMEOUT_S = 60.0


class PingWork:
    """`ping` begins, `pings` gives what there was since and goes on."""

    def __init__(self, address: str, stack: ExitStack) -> None:
        self._line = BlockingClient(address, m.SERVICE, name="bench ping")
        self._stop = threading.Event()
        self._asking = threading.Lock()  # held while an answer is out
        self._failure: MoonpoolError | None = None
        self._worst_s, self._count = 0.0, 0
        self._long: list[tuple[float, float]] = []
        self._thread: threading.Thread | None = None
        stack.callback(self._end)

    def work(self) -> dict[str, Callable[..., Any]]:
        return {"ping": self.ping, "pings": self.pings}

    def ping(self) -> None:
        gc.disable()
        self._thread = threading.Thread(target=self._ping_forever, name="ping")
        self._thread.start()

    def pings(self) -> dict[str, Any]:
        """Since the last time: how many, the longest wait, and the long ones as (begun at, lasted), all in seconds.

        Waits for the answer that is still out, so that no wait is told too short. Unavailable when the asking has
        ended or nothing was answered: then a longest wait of 0 would be a lie.
        """
        with self._asking:
            found = {"worst_s": self._worst_s, "count": self._count, "long": self._long}
            self._worst_s, self._count, self._long = 0.0, 0, []
        if self._failure is not None or not found["count"]:
            raise Unavailable(f"the master was not asked all the time: {self._failure or 'no answer'}")
        return found

    def _ping_forever(self) -> None:
        with contextlib.suppress(PermissionError):  # then it has to do without
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        call = m.Exist(keys=[block_key(0)])
        while not self._stop.is_set():
            with self._asking:
                begun_s = time.monotonic()
                try:
                    self._line.call(call, timeout_s=_TIMEOUT_S)
                except MoonpoolError as error:
                    self._failure = error
                    return
                self._note(begun_s, time.monotonic() - begun_s)
            time.sleep(_EVERY_S)

    def _note(self, begun_s: float, lasted_s: float) -> None:
        self._count += 1
        self._worst_s = max(self._worst_s, lasted_s)
        if lasted_s > _NOTED_S:
            self._long.append((begun_s, lasted_s))

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._line.close()
