"""How a case of `moonpool bench store` is measured and told, and which claims were missed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.bench.transfer import BenchLine, show

_BENCH = "store"


class StoreCase(NamedTuple):
    """`measure` and `baseline` give a figure in `unit`, measured in turns; a number is a claim, None: nothing to
    compare with. `claim` is what their ratio should reach, or with `smaller_is_better` not exceed.
    """

    name: str
    unit: str
    measure: Callable[[], float]
    baseline: Callable[[], float | None] | float | None = None
    claim: float | None = None
    smaller_is_better: bool = False


@dataclass(frozen=True, kw_only=True)
class BenchScale:
    """How much is measured. The best of `rounds` counts."""

    rounds: int = 3
    seconds: float = 1.0  # per measurement
    num_large: int = 64  # objects of 1 MiB in one batch
    num_small_batches: int = 20  # of 1,000 objects of 4 KiB, per client
    num_objects: int = 100_000  # known to the master
    ssd_nbytes: int = 2 << 30  # written to disk and read back

    @classmethod
    def quick(cls) -> BenchScale:
        """Seconds in all; says that it works, and little of how fast."""
        return cls(rounds=1, seconds=0.1, num_large=8, num_small_batches=2, num_objects=10_000, ssd_nbytes=64 << 20)


@dataclass
class ClaimReport:
    """Prints lines as they come and remembers which claims were missed."""

    as_json: bool
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
        self.tell(case, best(values), best(baselines) if baselines else None)

    def tell(self, case: StoreCase, value: float, baseline: float | None) -> None:
        ratio = None if not baseline else round(value / baseline, 3)
        shown = None if baseline is None else round(baseline, 3)
        line = BenchLine(
            bench=_BENCH, case=case.name, value=round(value, 3), unit=case.unit, baseline=shown, ratio=ratio
        )
        show(line, self.as_json)
        if ratio is not None and case.claim is not None:
            holds = ratio <= case.claim if case.smaller_is_better else ratio >= case.claim
            if not holds:
                self.missed.append(f"{case.name}: {ratio} instead of {case.claim}")

    def note(self, name: str, value: float, unit: str, *, at_most: float | None = None) -> None:
        """A figure that stands beside no other, or beside what it may be at most."""
        claim = None if at_most is None else 1.0
        self.tell(StoreCase(name, unit, lambda: value, None, claim, smaller_is_better=True), value, at_most)

    def sum_up(self) -> None:
        for missed in self.missed:
            say(f"below its claim: {missed}")


def say(line: str) -> None:
    """For people, beside the lines for programs."""
    print(f"bench store: {line}", file=sys.stderr, flush=True)
