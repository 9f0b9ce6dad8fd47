"""The thread that brings what was appended to a journal to disk: within `sync_s`, or soon after hurry()."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_LEAST_PAUSE_S = 0.01
_PAUSE_PER_SYNC = 4  # a file system may hold writes up while it syncs, so it syncs for a fifth of the time at most


def least_pause_s(took_s: float, sync_s: float) -> float:
    """Return how long to wait before the next sync, however urgent it is. `took_s` is what the last one took."""
    return min(max(_LEAST_PAUSE_S, _PAUSE_PER_SYNC * took_s), sync_s)


class SyncThread:
    """Calls `sync`, which does not raise, again and again while there is something to sync."""

    def __init__(self, sync: Callable[[], None], sync_s: float) -> None:
        self._sync, self._sync_s = sync, sync_s
        self._has_new = threading.Event()
        self._is_urgent = threading.Event()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="journal-sync", daemon=True)
        self._thread.start()

    def appended(self) -> None:
        """Sync within `sync_s`."""
        if not self._has_new.is_set():
            self._has_new.set()

    def hurry(self) -> None:
        """Sync soon if there is something to sync."""
        if not self._is_urgent.is_set():
            self._is_urgent.set()

    def close(self) -> None:
        """Return when the thread has ended. The last things may not be synced."""
        self._is_over.set()
        self._has_new.set()
        self._is_urgent.set()
        self._thread.join()

    def _run(self) -> None:
        took_s = 0.0
        while not self._is_over.is_set():
            self._has_new.wait()
            pause_s = least_pause_s(took_s, self._sync_s)
            self._is_over.wait(pause_s)
            self._is_urgent.wait(self._sync_s - pause_s)
            self._is_urgent.clear()
            self._has_new.clear()  # what is appended from now on may be left for the next time
            began_s = time.monotonic()
            self._sync()
            took_s = time.monotonic() - began_s
