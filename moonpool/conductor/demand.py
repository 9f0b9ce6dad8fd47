"""Requests that the workers cannot take: those that wait in the conductor, and those refused lately. Pure.

Workers report only what was sent to them, and admission sends no more than they can do in time. So the load beyond that
is here, by the role that is short: for prefill the predicted work of the prompts, for decode the sequences and their
tokens. A refused request counts as if it still waited, until the target of its time to first token has passed. In a
lasting overload of prefill workers the work that waits and was refused is then the offered load times that target.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.base.cluster import WorkerRole
from moonpool.conductor.admission.forms import Cause

_BUCKET_S = 0.1  # refusals within it are summed, so that memory does not follow their number


class UnmetWork(NamedTuple):
    """What some requests would have a role do: prefill workers `work_s` seconds, decode workers the rest."""

    work_s: float = 0.0
    num_seqs: int = 0
    kv_tokens: int = 0

    def plus(self, other: UnmetWork, sign: int = 1) -> UnmetWork:
        return UnmetWork(
            self.work_s + sign * other.work_s,
            self.num_seqs + sign * other.num_seqs,
            self.kv_tokens + sign * other.kv_tokens,
        )


_NONE = UnmetWork()


@dataclass(slots=True)
class _Bucket:
    since_s: float
    work: UnmetWork


class UnmetDemand:
    """`counted_s` is how long a refused request counts. `now_s` must not decrease from call to call."""

    def __init__(self, counted_s: float) -> None:
        self._counted_s = counted_s
        self._waiting: dict[str, UnmetWork] = {}
        self._sum = _NONE  # of those that wait
        self._refused: dict[WorkerRole, deque[_Bucket]] = {role: deque() for role in WorkerRole}
        self.short_of = WorkerRole.PREFILL  # what the requests that wait, wait for: the role that the first one lacks

    def waits(self, request_id: str, work: UnmetWork) -> None:
        """Count a request that waits in the conductor until `left`."""
        self._waiting[request_id] = work
        self._sum = self._sum.plus(work)

    def left(self, request_id: str) -> None:
        """Ignore a request that does not wait."""
        work = self._waiting.pop(request_id, None)
        if work is not None:
            self._sum = self._sum.plus(work, -1) if self._waiting else _NONE

    def refused(self, cause: Cause, work: UnmetWork, now_s: float) -> None:
        """Count a refused request, unless it would be too long for idle workers as well."""
        if cause is Cause.TOO_LONG:
            return
        buckets = self._refused[WorkerRole.DECODE if cause.is_of_decode else self._short_of()]
        if not buckets or now_s - buckets[-1].since_s >= _BUCKET_S:
            buckets.append(_Bucket(now_s, _NONE))
        buckets[-1].work = buckets[-1].work.plus(work)
        self._expire(buckets, now_s)

    def of(self, role: WorkerRole, now_s: float) -> UnmetWork:
        """Return what waits for this role or was refused for lack of it."""
        buckets = self._refused[role]
        self._expire(buckets, now_s)
        found = self._sum if role is self._short_of() else _NONE
        for bucket in buckets:
            found = found.plus(bucket.work)
        return found

    def _short_of(self) -> WorkerRole:
        """Return what the next request lacks: an empty queue counts as short of prefill workers."""
        return self.short_of if self._waiting else WorkerRole.PREFILL

    def _expire(self, buckets: deque[_Bucket], now_s: float) -> None:
        while buckets and now_s - buckets[0].since_s >= self._counted_s:
            buckets.popleft()
