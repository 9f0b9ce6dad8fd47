"""How a case of `moonpool bench store` is measured and reported, and which claims it missed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.bench.report import BenchReport


class StoreCase(NamedTuple):
    """`measure` and `baseline` return a figure in `unit`, and run alternately. A number as baseline is a claim; None:
    nothing to compare with. `claim` is the ratio to reach, or with `smaller_is_better` not to exceed.
    """

    name: str
    unit: str
    measure: Callable[[], float]
    baseline: Callable[[], float | None] | float | None = None
    claim: float | None = None
    smaller_is_better: bool = False


@dataclass(frozen=True, kw_only=True)
class BenchScale:
    """How much is measured. The best of `rounds` measurements counts."""

    rounds: int = 3
    seconds: float = 1.0  # per measurement
    num_large: int = 64  # objects of 1 MiB in one batch
    num_small_batches: int = 20  # of 1,000 objects of 4 KiB, per client
    num_objects: int = 100_000  # known to the master
    ssd_nbytes: int = 2 << 30  # written to disk and read back

    @classmethod
    def quick(cls) -> BenchScale:
        """A smoke test of a few seconds; its figures mean little."""
        return cls(rounds=1, seconds=0.1, num_large=8, num_small_batches=2, num_objects=10_000, ssd_nbytes=64 << 20)


@dataclass
class ClaimReport:
    """Reports each figure at once and keeps the claims that were missed."""

    figures: BenchReport
    missed: list[str] = field(default_factory=list)

    def measure(self, case: StoreCase, rounds: int) -> None:
        best = min if case.smaller_is_better else max
        values: list[float] = []
        baselines: list[float] = []
        for _ in range(rounds):
            values.append(case.measure())
            baseline = case.baseline() if callable(case.baseline) else case.baseline
            if baseline is not None:
                baselines.append(baseline)
        self.add(case, best(values), best(baselines) if baselines else None)

    def add(self, case: StoreCase, value: float, baseline: float | None, *, compared: bool = True) -> None:
        """Report a figure. `compared` is that of BenchReport.add()."""
        self.figures.add(case.name, value, case.unit, baseline, compared=compared)
        if baseline and case.claim is not None:
            ratio = round(value / baseline, 3)
            holds = ratio <= case.claim if case.smaller_is_better else ratio >= case.claim
            if not holds:
                self.missed.append(f"{case.name}: {ratio} instead of {case.claim}")

    def add_figure(
        self, name: str, value: float, unit: str, *, at_most: float | None = None, compared: bool = True
    ) -> None:
        """Report a figure without a baseline, or with the most it may be."""
        claim = None if at_most is None else 1.0
        case = StoreCase(name, unit, lambda: value, None, claim, smaller_is_better=True)
        self.add(case, value, at_most, compared=compared)

    def print_missed(self) -> None:
        for missed in self.missed:
            say(f"below its claim: {missed}")


def say(line: str) -> None:
    """Print a line for people on standard error."""
    print(f"bench store: {line}", file=sys.stderr, flush=True)
