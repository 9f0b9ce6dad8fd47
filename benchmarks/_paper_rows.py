"""A published number beside ours, and how both are printed."""

from __future__ import annotations

import json
from typing import NamedTuple

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


def as_json(row: Row, run_s: float) -> str:
    """One object; `run_s` is how long it took to find the row's number after the one before."""
    return json.dumps(
        {
            "bench": "paper",
            "case": row.case,
            "value": _rounded(row.value),
            "unit": row.unit,
            "baseline": row.theirs,
            "ratio": _rounded(row.ratio),
            "difference": _rounded(row.difference),
            "near": row.is_near,
            "note": row.comment,
            "run_s": round(run_s, 1),
        }
    )


def as_text(row: Row, run_s: float) -> str:
    ours = f"{row.value:10.3f}" if row.value is not None else f"{'-':>10}"
    theirs = f"{row.theirs:10.3f}" if row.theirs is not None else f"{'-':>10}"
    ratio = f"{row.ratio:6.2f}x" if row.ratio is not None else " " * 7
    mark = "  " if row.is_near in (True, None) else " *"
    return f"{row.case:62} {ours} {theirs} {ratio}{mark} {row.unit:16} {run_s:5.1f} s  {row.comment}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
