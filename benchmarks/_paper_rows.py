"""A published number beside ours."""

from __future__ import annotations

from typing import NamedTuple

from moonpool.bench.report import BenchReport

_NEAR_RATIO = 0.25
_NEAR_POINTS = 0.04  # of shares
_SHARES = ("share", "share of tokens", "share of blocks")


class Row(NamedTuple):
    """`value` is None where nothing here can measure it; `theirs` where the paper has no such number. `note` says where
    ours comes from, `why` why it is far from theirs, should it be."""

    case: str
    value: float | None
    unit: str
    theirs: float | None
    note: str = ""
    why: str = ""

    @property
    def difference(self) -> float | None:
        return None if self.value is None or self.theirs is None else self.value - self.theirs

    @property
    def ratio(self) -> float | None:
        return self.value / self.theirs if self.value is not None and self.theirs else None

    @property
    def is_near(self) -> bool | None:
        """Within 25 % of theirs, or for shares within 4 points; None where there is nothing to compare."""
        if self.difference is None:
            return None
        is_near = self.ratio is not None and abs(self.ratio - 1) <= _NEAR_RATIO
        return is_near or (self.unit in _SHARES and abs(self.difference) <= _NEAR_POINTS)

    @property
    def comment(self) -> str:
        """The note, and the reason where one is due."""
        reason = self.why if self.value is None or self.is_near is False else ""
        return "; ".join(part for part in (self.note, reason) if part)

    def add_to(self, report: BenchReport, run_s: float) -> None:
        """Report it; `run_s` is how long it took to find its number after the one before."""
        report.add(
            self.case,
            self.value,
            self.unit,
            self.theirs,
            compared=False,
            difference=None if self.difference is None else float(f"{self.difference:.4g}"),
            near=self.is_near,
            note=self.comment,
            run_s=round(run_s, 1),
        )
