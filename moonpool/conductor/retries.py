"""How long a front end keeps a request alive when its workers fail. Pure.

A request whose attempt ended with a lost worker is routed again, without that worker, from its last token on. A request
without tokens that is refused for load is refused to the client; a request that has tokens waits and is routed again,
and so does every request while there is no worker. Only a front end that is cut off from all conductors does not wait.

What an attempt costs depends on how it ended:

    ABSENT   the worker was gone, or its engine stood, before it computed anything of this request: costs nothing,
             unless `max_absences` of them come in a row (then the workers are registered, but cannot be used)
    DIED     the worker died while it computed this request: costs nothing, but after two deaths the request is a
             suspect. It is then computed alone; if that worker dies too, the request is given up as the cause
    REFUSED  a living worker failed the request (damaged or lost KV): after `max_attempts` the request is given up

So a request that does not cause the deaths is bounded by its deadline alone, whatever the number of workers that die.
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
    max_attempts: int = 4  # attempts that living workers may fail
    max_absences: int = 40  # in a row; with pauses of up to 1 s
    max_deaths: int = 2  # of workers that computed the request; the attempt after that computes it alone
    backoff_s: float = 0.1  # doubles from pause to pause
    max_backoff_s: float = 1.0
    worker_wait_s: float = 30.0  # for workers to register again

    def pause_s(self, num_pauses: int) -> float:
        return backoff_s(num_pauses, self.backoff_s, self.max_backoff_s)


class Retries:
    """The retries of one request. `lost` and `refused` return the pause before the next attempt; None: give up."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self.num_attempts = 0
        self.num_moves = 0  # from a worker that leaves to another one; such a part of an attempt is no failure
        self.failed: set[str] = set()  # workers to avoid
        self.is_fatal = False  # it was given up because it makes workers die
        self._num_deaths = 0
        self._num_refusals = self._num_absences = 0
        self._give_up_at_s: float | None = None  # set at the first refusal of an attempt
        self._num_pauses = 0

    @property
    def alone(self) -> bool:
        """Whether the next attempt must compute the request in a batch of one."""
        return self._num_deaths >= self._policy.max_deaths

    @property
    def epoch(self) -> int:
        """The number of this attempt, or of this part of it, for workers: it grows."""
        return self.num_attempts + self.num_moves

    def begin(self) -> None:
        """Count a new attempt."""
        self.num_attempts += 1
        self._give_up_at_s, self._num_pauses = None, 0

    def moved(self, worker: str) -> None:
        """The attempt goes on at another worker, because this one leaves."""
        self.num_moves += 1
        self.failed.add(worker)
        self._give_up_at_s, self._num_pauses = None, 0

    def lost(self, workers: Iterable[str], loss: Loss) -> float | None:
        """Count an attempt that ended without an answer; the next one avoids these workers."""
        self.failed.update(workers)
        self._num_absences = self._num_absences + 1 if loss is Loss.ABSENT else 0
        if loss is Loss.DIED:
            self.is_fatal = self.alone
            self._num_deaths += 1
        elif loss is Loss.REFUSED:
            self._num_refusals += 1
        is_unreachable = self._num_absences >= self._policy.max_absences
        if self.is_fatal or is_unreachable or self._num_refusals >= self._policy.max_attempts:
            return None
        return self._policy.pause_s(self.num_attempts - 1)

    def survived(self) -> None:
        """Count that a worker computed the request alone and lives: the request did not cause the deaths before."""
        self._num_deaths = 0

    def refused(self, now_s: float, *, for_load: bool, has_tokens: bool, is_cut_off: bool = False) -> float | None:
        """Count a refusal by the conductor: for load, or because there are no workers. A front end that `is_cut_off`
        reaches no conductor's machine: nothing there will start again in a moment, and the client may ask another one.
        """
        if is_cut_off or (for_load and not has_tokens):
            return None
        if self.failed:
            self.failed.clear()  # there are no other workers, and those that failed may be back
            return 0.0
        if self._give_up_at_s is None:
            self._give_up_at_s = now_s + self._policy.worker_wait_s
        if now_s >= self._give_up_at_s:
            return None
        self._num_pauses += 1
        return self._policy.pause_s(self._num_pauses - 1)
