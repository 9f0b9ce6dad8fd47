"""A thread whose starter does not wait for it."""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
from collections.abc import Callable

from moonpool.base.clock import Deadline


class SideThread:
    """Runs `act` in a daemon thread of this name, from now on.

    Thread.start() returns when the new thread has run for the first time, which takes tens of milliseconds on busy
    cores. Here a third thread waits for that: a caller in the middle of a request goes on at once.
    """

    def __init__(self, act: Callable[[], None], name: str) -> None:
        self._act = act
        self._over = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _thread.start_new_thread(self._start, ())

    def is_alive(self) -> bool:
        """Return whether `act` has not ended, or not begun yet. False in a forked process: it has no such thread."""
        return self._pid == os.getpid() and not self._over.is_set()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, this long at most. Return at once in a forked process."""
        deadline = Deadline(timeout_s)
        if self._pid == os.getpid() and self._over.wait(timeout_s):
            with contextlib.suppress(RuntimeError):  # it never started
                self._thread.join(deadline.remaining_s())

    def _start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # no memory for a thread, or the interpreter ends: the next caller tries again
            self._over.set()

    def _run(self) -> None:
        try:
            self._act()
        finally:
            self._over.set()
