"""When a worker changes its role: the elastic rule. Pure.

The load of each role is its pressure: 1 means that its target is just met. Of prefill workers it is the work that waits
for each, relative to the target of the time to first token; of decode workers the predicted time between tokens
relative to its target, or the share of places or pages in use if that is more. Requests that wait in the conductor, or
were refused lately, count for the role that was short (demand.py): without them a role at its limit would never seem
to be above it. A worker moves when that lowers the higher of the two pressures by a fifth or more, the rule has said so
for `HOLD_S`, and the last move is `REST_S` ago: loads that swing faster than roles can follow move nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moonpool.base.cluster import WorkerRole
from moonpool.conductor.admission.forms import AdmissionConfig
from moonpool.conductor.demand import UnmetDemand
from moonpool.conductor.registration import Registration

REBALANCE_S = 0.5  # between two looks at the rule
HOLD_S = 2.0
REST_S = 5.0
_BUSY = 0.7  # with a lower pressure nothing moves: admission keeps pressures from rising much above 1
_GAIN = 0.8  # of the higher pressure, that a move must leave at most
_MOST = 4  # times the present workers, that are wanted at most
_TTFT_S = 2.0  # the target if there is none


def aimed_ttft_s(targets: AdmissionConfig) -> float:
    """Return the target of the time to first token, or what the rule takes instead."""
    return targets.ttft_slo_s or _TTFT_S


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """What all workers of both roles have to do, each sum independent of how many workers there are."""

    num_prefill: int = 0
    num_decode: int = 0
    work_s: float = 0.0  # predicted, of prompts that wait, are computed, or were refused lately
    num_seqs: int = 0  # that decode, or wait or were refused for lack of decode workers; those in prefill do not count
    kv_tokens: int = 0
    used_pages: int = 0
    max_num_seqs: int = 1  # of one worker
    num_pages: int = 1  # of one worker

    @classmethod
    def of(cls, workers: Iterable[Registration], unmet: UnmetDemand, now_s: float) -> ClusterLoad:
        """Return the work of these workers, and what they could not be given."""
        everyone = list(workers)
        prompts, answers = unmet.of(WorkerRole.PREFILL, now_s), unmet.of(WorkerRole.DECODE, now_s)
        prefills = [worker for worker in everyone if worker.is_prefill]
        decodes = [worker for worker in everyone if not worker.is_prefill]
        batches = [worker.decode_now for worker in decodes]
        return cls(
            num_prefill=len(prefills),
            num_decode=len(decodes),
            work_s=prompts.work_s + sum(worker.backlog.wait_s(now_s) for worker in prefills),
            num_seqs=answers.num_seqs + sum(batch.num_seqs for batch in batches),
            kv_tokens=answers.kv_tokens + sum(batch.kv_tokens for batch in batches),
            used_pages=sum(worker.info.num_pages - worker.decode_load.free_pages for worker in decodes),
            max_num_seqs=max((worker.info.max_num_seqs for worker in decodes), default=1),
            num_pages=max((worker.info.num_pages for worker in decodes), default=1),
        )


class ElasticRule:
    """`step_s` predicts the time between tokens of a batch from its sequences and its KV tokens."""

    def __init__(self, targets: AdmissionConfig, step_s: Callable[[float, float], float]) -> None:
        self._ttft_s, self._tbt_s = aimed_ttft_s(targets), targets.tbt_slo_s
        self._step_s = step_s
        self._wanted: WorkerRole | None = None
        self._since_s = 0.0  # how long it is wanted
        self._moved_s: float | None = None

    def pressure(self, load: ClusterLoad, role: WorkerRole, num_workers: int) -> float:
        """Return the pressure of a role if that many workers had to do its work."""
        if role is WorkerRole.PREFILL:
            return load.work_s / num_workers / self._ttft_s
        per_worker = load.num_seqs / num_workers
        used = max(per_worker / load.max_num_seqs, load.used_pages / num_workers / load.num_pages)
        if self._tbt_s is None or not load.num_seqs:
            return used
        return max(used, self._step_s(per_worker, load.kv_tokens / num_workers) / self._tbt_s)

    def slack_s(self, load: ClusterLoad, role: WorkerRole, num_workers: int) -> float | None:
        """Return the role's target less what is predicted: of the time to first token for prefill, of the time between
        tokens for decode; None if it has no target."""
        if role is WorkerRole.PREFILL:
            return self._ttft_s - load.work_s / num_workers
        if self._tbt_s is None:
            return None
        step_s = self._step_s(load.num_seqs / num_workers, load.kv_tokens / num_workers) if load.num_seqs else 0.0
        return self._tbt_s - step_s

    def wanted(self, load: ClusterLoad, role: WorkerRole) -> int:
        """Return the number of workers that would bring the role's pressure down to that of a role that is not busy, at
        most `_MOST` times as many as there are: for autoscalers."""
        present = load.num_prefill if role is WorkerRole.PREFILL else load.num_decode
        most = max(1, _MOST * present)
        return next((number for number in range(1, most) if self.pressure(load, role, number) < _BUSY), most)

    def decide(self, load: ClusterLoad, now_s: float) -> WorkerRole | None:
        """Return the role that one worker of the other role should take now; None: nothing moves."""
        wanted = self._best(load)
        if wanted is not self._wanted:
            self._wanted, self._since_s = wanted, now_s
        rested = self._moved_s is None or now_s - self._moved_s >= REST_S
        if wanted is None or now_s - self._since_s < HOLD_S or not rested:
            return None
        self._wanted, self._moved_s = None, now_s
        return wanted

    def _best(self, load: ClusterLoad) -> WorkerRole | None:
        """Return the role whose gain of a worker lowers the higher pressure enough; None if neither does."""
        numbers = {WorkerRole.PREFILL: load.num_prefill, WorkerRole.DECODE: load.num_decode}
        if not all(numbers.values()):
            return None
        now = {role: self.pressure(load, role, number) for role, number in numbers.items()}
        gaining = max(now, key=lambda role: now[role])
        losing = WorkerRole.DECODE if gaining is WorkerRole.PREFILL else WorkerRole.PREFILL
        if numbers[losing] < 2 or now[gaining] < _BUSY:
            return None
        after = max(
            self.pressure(load, gaining, numbers[gaining] + 1), self.pressure(load, losing, numbers[losing] - 1)
        )
        return gaining if after <= _GAIN * now[gaining] else None


def least_busy(workers: Iterable[Registration], role: WorkerRole, now_s: float) -> Registration | None:
    """Return the worker of the role that may change it and has the least to end before; None if all are fixed."""
    movable = [worker for worker in workers if worker.info.role is role and not worker.info.fixed]
    return min(movable, key=lambda worker: (worker.backlog.wait_s(now_s), worker.decode_load.kv_tokens), default=None)
