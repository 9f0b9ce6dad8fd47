"""How long a front end keeps a request alive when workers go away under it. Pure.

A request whose attempt ended with a lost worker is asked for again, without that worker, from its last token on. A
request without tokens that is refused for load is refused; one that has some waits, as all do when there is no worker.

What an attempt costs depends on whose fault its end was:

    ABSENT   the worker was gone before it computed anything of this request: costs nothing, unless `max_absences` of
             them come in a row (then the workers are registered, but cannot be reached from here)
    DIED     the worker died while it computed this request: costs nothing, but after two of them the request is a
             suspect. It is then computed alone; if that worker dies too, the request is given up as the cause
    REFUSED  a living worker failed it (damaged or lost KV): after `max_attempts` of them the request is given up

So a request that is not the cause of anything is bounded by its deadline alone, however many workers die around it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from moonpool.base.backoff import backoff_s


class Loss(Enum):
    """Why an attempt ended without an answer."""

    ABSENT = auto()
    DIED = auto()
    REFUSED = auto()


@dataclass(frozen=True)
class RetryPolicy:
    max_attempts: int = 4  # that living workers may fail
    max_absences: int = 40  # in a row; with pauses of up to 1 s
    max_deaths: int = 2  # of workers that computed the request; the next attempt computes it alone
    backoff_s: float = 0.1  # doubles from pause to pause
    max_backoff_s: float = 1.0
    worker_wait_s: float = 30.0  # for workers to register again

    def pause_s(self, num_pauses: int) -> float:
        return backoff_s(num_pauses, self.backoff_s, self.max_backoff_s)


class Retries:
    """Of one request. The answers are how long to pause before it is asked for again; None: it is given up."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self.num_attempts = 0
        self.failed: set[str] = set()  # workers to be left out
        self.is_fatal = False  # it was given up because workers die of it
        self._num_deaths = 0
        self._num_refusals = self._num_absences = 0
        self._patient_until_s: float | None = None  # since the first refusal; a turn may come later than that
        self._num_pauses = 0

    @property
    def alone(self) -> bool:
        """Whether the next attempt must compute it apart from other requests."""
        return self._num_deaths >= self._policy.max_deaths

    def begin(self) -> None:
        """Another attempt is being planned."""
        self.num_attempts += 1
        self._patient_until_s, self._num_pauses = None, 0

    def lost(self, workers: Iterable[str], loss: Loss) -> float | None:
        """Take in that the attempt ended, and that these workers are to be avoided by the next one."""
        self.failed.update(workers)
        self._num_absences = self._num_absences + 1 if loss is Loss.ABSENT else 0
        if loss is Loss.DIED:
            self.is_fatal = self.alone
            self._num_deaths += 1
        elif loss is Loss.REFUSED:
            self._num_refusals += 1
        is_out_of_reach = self._num_absences >= self._policy.max_absences
        if self.is_fatal or is_out_of_reach or self._num_refusals >= self._policy.max_attempts:
            return None
        return self._policy.pause_s(self.num_attempts - 1)

    def survived(self) -> None:
        """Take in that a worker computed it alone and lives: the deaths before were not its fault."""
        self._num_deaths = 0

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
