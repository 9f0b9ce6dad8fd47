"""The results of a trace's requests, as columns, and summary numbers. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moonpool.sim.world.job import DONE, LOST, REFUSED, Job
from moonpool.traces.columns import Floats

_PERCENTILES = (50, 90, 99)
_NUMBER = re.compile(r"\d+(\.\d+)?")
HIT_PLACES = ("local", "dram", "remote", "ssd")  # GPU pages of the worker; its node's memory; other nodes' memory; SSD


@dataclass(frozen=True, eq=False, kw_only=True)
class Results:
    """One row per request; times in seconds, NaN for an event that did not happen."""

    arrival_s: Floats
    ttft_s: Floats
    tbt_s: Floats
    end_s: Floats
    compute_s: Floats
    num_input: Floats
    hit_tokens: dict[str, Floats]
    is_done: NDArray[np.bool_]
    is_wasted: NDArray[np.bool_]  # refused after the prefill
    is_lost: NDArray[np.bool_]  # lost workers in all attempts
    num_retries: Floats  # attempts after a lost worker
    refusals: dict[str, int]

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> Results:
        def column(values: list[float | None]) -> Floats:
            return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

        done = np.array([job.outcome == DONE for job in jobs], dtype=np.bool_)
        return cls(
            arrival_s=column([job.arrival_s for job in jobs]),
            ttft_s=column([job.ttft_s for job in jobs]),
            tbt_s=column([job.tbt_s for job in jobs]),
            end_s=column([job.end_s if job.outcome == DONE else None for job in jobs]),
            compute_s=column([job.compute_s for job in jobs]),
            num_input=column([job.num_input for job in jobs]),
            hit_tokens={name: column([getattr(job, f"{name}_tokens") for job in jobs]) for name in HIT_PLACES},
            is_done=done,
            is_wasted=np.array([job.is_wasted for job in jobs], dtype=np.bool_),
            is_lost=np.array([job.outcome == LOST for job in jobs], dtype=np.bool_),
            num_retries=column([job.num_retries for job in jobs]),
            refusals=dict(Counter(_kind(job.reason) for job in jobs if job.outcome == REFUSED)),
        )

    def __len__(self) -> int:
        return len(self.arrival_s)

    def effective_share(self, ttft_slo_s: float, tbt_slo_s: float) -> float:
        """Return the share of all requests that were done within both targets."""
        good = self.is_done & (self.ttft_s <= ttft_slo_s) & (self.tbt_s <= tbt_slo_s)
        return float(good.mean()) if len(good) else 0.0

    def goodput(self, ttft_slo_s: float, tbt_slo_s: float) -> float:
        """Return the requests per second that were done within both targets, over the time of the arrivals."""
        lasted_s = float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) > 1 else 0.0
        return self.effective_share(ttft_slo_s, tbt_slo_s) * len(self) / lasted_s if lasted_s else 0.0

    def hit_share(self, place: str) -> float:
        """Return the share of the prompt tokens of done requests that were reused from `place`."""
        total = float(self.num_input[self.is_done].sum())
        return float(self.hit_tokens[place][self.is_done].sum()) / total if total else 0.0

    def summary(self) -> dict[str, float]:
        """Return numbers by name; the names carry units."""
        done = self.is_done
        numbers: dict[str, float] = {
            "num_requests": len(self),
            "num_done": int(done.sum()),
            "num_refused": sum(self.refusals.values()),
            "num_lost": int(self.is_lost.sum()),
            "num_retries": int(self.num_retries.sum()),
            "num_wasted_prefills": int(self.is_wasted.sum()),
            "prefill_gpu_s_mean": _mean(self.compute_s[done]),
            "ttft_s_mean": _mean(self.ttft_s[done]),
            "tbt_s_mean": _mean(self.tbt_s[done]),
        }
        for name, values in (("ttft_s", self.ttft_s[done]), ("tbt_s", self.tbt_s[done])):
            for percentile in _PERCENTILES:
                numbers[f"{name}_p{percentile}"] = float(np.percentile(values, percentile)) if len(values) else 0.0
        for place in HIT_PLACES:
            numbers[f"hit_share_{place}"] = self.hit_share(place)
        numbers["hit_share"] = sum(self.hit_share(place) for place in HIT_PLACES)
        return numbers


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


def _kind(reason: str) -> str:
    """Return the reason of a refusal with its numbers replaced by N."""
    return _NUMBER.sub("N", reason)
