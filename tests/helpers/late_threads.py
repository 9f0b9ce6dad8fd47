"""Threads that begin late, as on cores that are busy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

_LONGEST_S = 10.0


@contextmanager
def no_thread_begins() -> Iterator[threading.Event]:
    """No new thread runs before the event is set, or before the end. A caller that waits for one gets an error."""
    free, start = threading.Event(), threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if not free.wait(_LONGEST_S):
            raise AssertionError(f"a caller waited for the thread {thread.name!r} to begin")
        start(thread)

    with patch.object(threading.Thread, "start", start_late):
        try:
            yield free
        finally:
            free.set()
