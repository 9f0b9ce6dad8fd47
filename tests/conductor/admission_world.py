"""A small world for admission: prefill servers and decode servers, first come first served, on a virtual clock.

Decoding is fluid: all sequences of a server advance at one token per step, and the step time depends on the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from moonpool.conductor.admission.forecast import DecodeForecast, ExpectedDecode, SystemForecast
from moonpool.conductor.admission.forms import (
    Admission,
    AdmissionConfig,
    AdmissionForm,
    DecodeNow,
    PrefillNow,
    RefusedRequest,
)
from moonpool.conductor.admission.request_forecast import OutputLengths, RequestForecast

TTFT_SLO_S = 10.0
TBT_SLO_S = 0.06
NUM_PREFILLS = 8
NUM_DECODES = 4


def prefill_s(num_tokens: int) -> float:
    return 0.068 + 0.1123 * num_tokens / 1024 + 7.79e-4 * (num_tokens / 1024) ** 2


def step_s(num_seqs: float, kv_tokens: float) -> float:
    return 0.0263 + 1e-3 * num_seqs + 3.55e-8 * kv_tokens


@dataclass(slots=True, eq=False)
class Job:
    request_id: str
    arrived_s: float
    num_tokens: int
    output_tokens: int
    worst_tbt_s: float = 0.0
    ttft_s: float = 0.0
    decode: DecodeServer | None = None


@dataclass(slots=True)
class Outcome:
    offered: int = 0
    refused: int = 0
    wasted: int = 0  # prefilled, then refused
    good: int = 0  # done within both targets
    done: int = 0
    retry_after: list[float | None] = field(default_factory=list)
    last_s: float = 0.0

    @property
    def rejected(self) -> int:
        return self.refused + self.wasted


class PrefillServer:
    def __init__(self) -> None:
        self.free_s = 0.0

    def queue_s(self, now_s: float) -> float:
        return max(0.0, self.free_s - now_s)


class DecodeServer:
    """`progress` is how many tokens a sequence would have had that was there since the start of the world."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.ends: list[tuple[float, int, Job]] = []
        self.progress = 0.0
        self.kv_tokens = 0
        self.since_s = 0.0
        self.version = 0
        self.coming = 0
        self.coming_tokens = 0

    def now(self) -> DecodeNow:
        return DecodeNow(len(self.jobs), self.kv_tokens)

    def advance(self, now_s: float) -> None:
        if self.jobs:
            self.progress += (now_s - self.since_s) / step_s(len(self.jobs), self.kv_tokens)
        self.since_s = now_s

    def add(self, job: Job, number: int) -> None:
        self.jobs[job.request_id] = job
        self.kv_tokens += job.num_tokens
        heappush(self.ends, (self.progress + job.output_tokens, number, job))
        tbt_s = step_s(len(self.jobs), self.kv_tokens)
        for other in self.jobs.values():
            other.worst_tbt_s = max(other.worst_tbt_s, tbt_s)

    def next_end_s(self) -> float | None:
        if not self.ends:
            return None
        left = max(0.0, self.ends[0][0] - self.progress)
        return self.since_s + left * step_s(len(self.jobs), self.kv_tokens)

    def pop_ended(self) -> list[Job]:
        ended = []
        while self.ends and self.ends[0][0] <= self.progress + 1e-6:
            job = heappop(self.ends)[2]
            del self.jobs[job.request_id]
            self.kv_tokens -= job.num_tokens
            ended.append(job)
        return ended


class World:
    """Drives one Admission through a list of jobs."""

    def __init__(self, form: AdmissionForm) -> None:
        config = AdmissionConfig(form, TTFT_SLO_S, TBT_SLO_S)
        self.lengths, is_paper = OutputLengths(), form is AdmissionForm.PAPER
        self.forecast: DecodeForecast = SystemForecast() if is_paper else RequestForecast(self.lengths)
        self.admission = Admission(config, step_s, self.forecast)
        self.prefills = [PrefillServer() for _ in range(NUM_PREFILLS)]
        self.decodes = [DecodeServer() for _ in range(NUM_DECODES)]
        self.outcome = Outcome()
        self._events: list[tuple[float, int, str, object]] = []
        self._number = count()

    def run(self, jobs: list[Job]) -> Outcome:
        for job in jobs:
            self._at(job.arrived_s, "arrive", job)
        while self._events:
            now_s, _, kind, what = heappop(self._events)
            getattr(self, f"_{kind}")(what, now_s)
        self.outcome.last_s = jobs[-1].arrived_s
        return self.outcome

    def _at(self, at_s: float, kind: str, what: object) -> None:
        heappush(self._events, (at_s, next(self._number), kind, what))

    def _views(self) -> list[DecodeNow]:
        return [one.now() for one in self.decodes]

    def _arrive(self, job: Job, now_s: float) -> None:
        self.outcome.offered += 1
        work_s = prefill_s(job.num_tokens)
        prefills = [PrefillNow(one.queue_s(now_s), work_s) for one in self.prefills]
        verdict = self.admission.at_arrival(job.num_tokens, prefills, self._views(), now_s)
        if isinstance(verdict, RefusedRequest):
            self.outcome.refused += 1
            self.outcome.retry_after.append(verdict.retry_after_s)
            return
        server = min(self.prefills, key=lambda one: one.free_s)
        server.free_s = max(now_s, server.free_s) + work_s
        self._at(server.free_s, "prefilled", job)
        job.decode = self._select_decode()
        job.decode.coming += 1
        job.decode.coming_tokens += job.num_tokens
        expected = ExpectedDecode(job.request_id, server.free_s, job.num_tokens, 2000, "t")
        self.forecast.expect(expected, now_s)

    def _select_decode(self) -> DecodeServer:
        """The same in all forms: the smallest step with those on their way counted, as the conductor's policy does."""

        def step_then_s(one: DecodeServer) -> float:
            return step_s(len(one.jobs) + one.coming, one.kv_tokens + one.coming_tokens)

        return min(self.decodes, key=step_then_s)

    def _prefilled(self, job: Job, now_s: float) -> None:
        job.ttft_s = now_s - job.arrived_s
        server = job.decode
        assert server is not None
        server.coming -= 1
        server.coming_tokens -= job.num_tokens
        verdict = self.admission.before_decode(job.num_tokens, [server.now()], now_s)
        if isinstance(verdict, RefusedRequest):
            self.outcome.wasted += 1
            self.forecast.end(job.request_id, now_s)
            return
        self.forecast.join(job.request_id, now_s)
        server.advance(now_s)
        server.add(job, next(self._number))
        self._plan(server)

    def _plan(self, server: DecodeServer) -> None:
        server.version += 1
        at_s = server.next_end_s()
        if at_s is not None:
            self._at(at_s, "decoded", (server, server.version))

    def _decoded(self, what: tuple[DecodeServer, int], now_s: float) -> None:
        server, version = what
        if server.version != version:
            return
        server.advance(now_s)
        for job in server.pop_ended():
            self.forecast.end(job.request_id, now_s, job.output_tokens)
            self.lengths.learn("t", job.output_tokens)
            self.outcome.done += 1
            self.outcome.good += job.ttft_s <= TTFT_SLO_S and job.worst_tbt_s <= TBT_SLO_S + 1e-9
        self._plan(server)


def steady(rate: float) -> Callable[[float], float]:
    return lambda _: rate


def saw_tooth(low: float, high: float, period_s: float) -> Callable[[float], float]:
    """Rises from low to high over each period, then falls back at once."""
    return lambda at_s: low + (high - low) * (at_s % period_s) / period_s


def arrivals(rate: Callable[[float], float], peak: float, duration_s: float, seed: int) -> list[Job]:
    """Poisson at a rate that changes and is nowhere above peak; lengths are log-normal with long tails."""
    draw, now_s = random.Random(seed), 0.0
    jobs: list[Job] = []
    while now_s < duration_s:
        now_s += draw.expovariate(peak)
        num_tokens = min(120_000, 200 + int(draw.lognormvariate(8.5, 0.9)))
        output_tokens = min(2000, 10 + int(draw.lognormvariate(5.3, 0.7)))
        if draw.random() * peak < rate(now_s):
            jobs.append(Job(f"r{len(jobs)}", now_s, num_tokens, output_tokens))
    return jobs
