"""Threads that work off requests in order, with a bound on what waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

Answer = Callable[[bool], None]  # called once: True to do the work, False to give it up


class _Waiting(NamedTuple):
    answer: Answer
    nbytes: int


class RequestLane:
    """At most `max_requests` requests and `max_nbytes` bytes wait. A single request of more bytes is accepted when no
    other waits, so that every size can pass.
    """

    def __init__(self, name: str, num_threads: int, max_requests: int, max_nbytes: int | None = None) -> None:
        self._max_requests, self._max_nbytes = max_requests, max_nbytes
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._nbytes = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, answer: Answer, nbytes: int = 0) -> bool:
        """Add a request and return at once. Return False when it is refused: the lane is full or closed."""
        with self._changed:
            if self._is_closed or self._is_full(nbytes):
                return False
            self._waiting.append(_Waiting(answer, nbytes))
            self._nbytes += nbytes
            self._changed.notify()
        return True

    def close(self) -> None:
        """Give up what waits, and return when no request is being worked on. Idempotent."""
        with self._changed:
            self._is_closed = True
            dropped = list(self._waiting)
            self._waiting.clear()
            self._nbytes = 0
            self._changed.notify_all()
        for each in dropped:
            each.answer(False)
        for thread in self._threads:
            thread.join()

    def _is_full(self, nbytes: int) -> bool:
        if len(self._waiting) >= self._max_requests:
            return True
        return self._max_nbytes is not None and self._nbytes > 0 and self._nbytes + nbytes > self._max_nbytes

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if not self._waiting:
                    return
                request = self._waiting.popleft()
                self._nbytes -= request.nbytes
            request.answer(True)
            del request  # its buffers are the caller's; keep nothing of them while waiting
