"""How long a front end keeps a request alive when workers go away under it. Pure.

A request whose attempt ended with a lost worker is asked for again, without that worker, from its last token on. A
request without tokens that is refused for load is refused; one that has some waits, as all do when there is no worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class RetryPolicy:
    max_attempts: int = 4
    backoff_s: float = 0.1  # doubles from pause to pause
    max_backoff_s: float = 1.0
    worker_wait_s: float = 30.0  # for workers to register again

    def pause_s(self, num_pauses: int) -> float:
        return min(self.backoff_s * 2.0**num_pauses, self.max_backoff_s)


class Retries:
    """Of one request. The answers are how long to pause before it is asked for again; None: it is given up."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self.num_attempts = 0
        self.failed: set[str] = set()  # workers to be left out
        self._patient_until_s: float | None = None  # since the first refusal; a turn may come later than that
        self._num_pauses = 0

    def begin(self) -> None:
        """Another attempt is being planned."""
        self.num_attempts += 1
        self._patient_until_s, self._num_pauses = None, 0

    def lost(self, workers: Iterable[str]) -> float | None:
        """The attempt ended, and these workers are to blame."""
        self.failed.update(workers)
        if self.num_attempts >= self._policy.max_attempts:
            return None
        return self._policy.pause_s(self.num_attempts - 1)

    def refused(self, now_s: float, *, for_load: bool, has_tokens: bool) -> float | None:
        """The conductor said no: too many requests, or no workers."""
        if for_load and not has_tokens:
            return None
        if self.failed:
            self.failed.clear()  # there are no others: those that failed may be back
            return 0.0
        if self._patient_until_s is None:
            self._patient_until_s = now_s + self._policy.worker_wait_s
        if now_s >= self._patient_until_s:
            return None
        self._num_pauses += 1
        return self._policy.pause_s(self._num_pauses - 1)
