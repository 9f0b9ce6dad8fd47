"""The history of benchmarks: which figures became worse by a fifth. Pure: no clock and no files.

`compare` sets the commit of the newest line beside the other ones, as measured on machines of the same kind:

- a commit's figure is the best of its runs, since other work on a machine makes a figure worse and hardly ever better;
- it is compared with the median of the figures of the five other commits that were measured last, so that one lucky or
  disturbed run does not decide;
- if the machine itself was slower than at those commits, by its own speed figure, the figure may be worse by as much.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

Better: TypeAlias = Literal["larger", "smaller"]
Case: TypeAlias = tuple[str, str, str]

LOST_SHARE = 0.2
_NUM_EARLIER = 5
_SHARES = ("hit rate", "prefill saved")
_SIZES = ("GB",)
_TIME = re.compile(r"(ns|us|ms|s)\b")


class HistoryLine(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one run. `better` is None for a figure that is not compared."""

    date: str
    commit: str  # with "+" and a digest of the changes if there were some
    cpu: str
    cores: int
    speed: float  # of a fixed loop on this machine right before the run
    bench: str
    case: str
    value: float
    unit: str
    ratio: float | None = None  # to the baseline of the same run
    better: Better | None = None


class CaseChange(msgspec.Struct, frozen=True, kw_only=True):
    """`kept` is how much of the earlier speed is left: 0.5 is half as fast, or twice as long. `before` and `kept` are
    None where no earlier commit has a figure.
    """

    bench: str
    case: str
    unit: str
    value: float
    before: float | None
    kept: float | None
    lost: bool
    commit: str
    num_earlier: int


def better_of(unit: str) -> Better | None:
    """Return which figures of a unit are better: larger rates, smaller times and sizes. None: neither, as of counts."""
    if unit in _SHARES or unit == "per s" or unit.endswith("/s"):
        return "larger"
    return "smaller" if unit in _SIZES or _TIME.match(unit) else None


def compare(lines: Sequence[HistoryLine]) -> list[CaseChange]:
    """Compare the figures of the newest line's commit with those of other commits, on machines of its kind. The
    lines are in the order in which they were recorded. Figures without a better direction are left out.
    """
    if not lines:
        return []
    newest = lines[-1]
    by_case: dict[Case, list[HistoryLine]] = defaultdict(list)
    for line in lines:
        if line.better is not None and (line.cpu, line.cores) == (newest.cpu, newest.cores):
            by_case[line.bench, line.case, line.unit].append(line)
    changes = (_change(found, newest.commit) for found in by_case.values())
    return [change for change in changes if change is not None]


def _change(lines: Sequence[HistoryLine], commit: str) -> CaseChange | None:
    """Return the change of one case at this commit; None if the commit has no figure of it."""
    of_commits: dict[str, list[HistoryLine]] = {}
    for line in lines:
        of_commits[line.commit] = [*of_commits.pop(line.commit, []), line]  # commits in the order of their last run
    if commit not in of_commits:
        return None
    value = _best(of_commits.pop(commit))
    earlier = [_best(found) for found in of_commits.values()][-_NUM_EARLIER:]
    before = statistics.median([line.value for line in earlier]) if earlier else None
    kept = None if before is None else _kept(value, before, statistics.median([line.speed for line in earlier]))
    return CaseChange(
        bench=value.bench,
        case=value.case,
        unit=value.unit,
        value=value.value,
        before=before,
        kept=kept,
        lost=kept is not None and kept <= 1 - LOST_SHARE,
        commit=commit,
        num_earlier=len(earlier),
    )


def _best(lines: Iterable[HistoryLine]) -> HistoryLine:
    return max(lines, key=lambda line: line.value if line.better == "larger" else -line.value)


def _kept(line: HistoryLine, before: float, speed_before: float) -> float | None:
    """Return the share of the earlier speed that is left, allowing for a machine that is slower now; None if nothing
    can be divided by.
    """
    now, then = (line.value, before) if line.better == "larger" else (before, line.value)
    slower = 1.0 if line.unit in _SHARES + _SIZES else min(1.0, line.speed / speed_before)
    return now / then / slower if then else None
