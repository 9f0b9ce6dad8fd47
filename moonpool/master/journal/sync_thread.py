"""The thread that brings what was appended to a journal to disk: within `sync_s`, or soon after hurry()."""

from __future__ import annotations

import threading
from collections.abc import Callable

_LEAST_PAUSE_S = 0.01  # between two syncs, however urgent


class SyncThread:
    """Calls `sync`, which does not raise, again and again while there is something to sync."""

    def __init__(self, sync: Callable[[], None], sync_s: float) -> None:
        self._sync = sync
        self._least_pause_s = min(_LEAST_PAUSE_S, sync_s)
        self._further_pause_s = sync_s - self._least_pause_s
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
        while not self._is_over.is_set():
            self._has_new.wait()
            self._is_over.wait(self._least_pause_s)
            self._is_urgent.wait(self._further_pause_s)
            self._is_urgent.clear()
            self._has_new.clear()  # what is appended from now on may be left for the next time
            self._sync()
