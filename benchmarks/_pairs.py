"""A benchmark in two checkouts, in turns: what became slower, with its interval.

    git worktree add build/old COMMIT
    python benchmarks/_pairs.py --old build/old -- -m moonpool bench transfer --json --rounds 1
    python benchmarks/_pairs.py --old build/old -- benchmarks/vs_mooncake.py --json --rounds 1

What follows `--` are the arguments of Python. It runs in each checkout, whose package it imports. Each pair runs both,
and the next one in the other order, so that a machine that becomes slower or faster counts for both. A case is a line
of the benchmark's JSON with a unit that says which direction is better.

`value` is the speed that the new checkout keeps: 0.97 is 3 % slower; the median of all pairs. `interval` holds the true
median with at least 95 % (by order statistics, which assume no distribution). `cpu` is the same of processor time per
operation: 0.97 is 3 % more. It is what all processes of the benchmark used between two lines, divided by the
operations that the figure implies for that time; other work of the benchmark in between counts, too.

Exits with status 1 if the whole interval of a case is below `--allow`, or if a case did not come from both.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from moonpool.bench.history import better_of
from moonpool.bench.report import BenchReport, bench_parser

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_LEAST_CPU_S = 0.05  # below, the clock's ticks decide
_LEAST_GAP_S = 0.1  # between lines of different measurements


class Figure(NamedTuple):
    """`rate` is in operations per second, or any other unit that is better when it is larger."""

    rate: float
    cpu_per_operation: float | None


class Line(NamedTuple):
    """A line of a benchmark, and the time and the processor time since the one before."""

    fields: dict[str, Any]
    seconds: float
    cpu_s: float


Pair: TypeAlias = tuple[dict[str, Figure], dict[str, Figure]]


class Kept(NamedTuple):
    """What is left of the old speed, with the interval."""

    median: float
    low: float
    high: float


def kept(ratios: Sequence[float]) -> Kept:
    """Return the median of the ratios with its interval; the whole range if there are fewer than six."""
    ordered = sorted(ratios)
    left_out = num_left_out(len(ordered))
    return Kept(statistics.median(ordered), ordered[left_out], ordered[-1 - left_out])


def num_left_out(number: int) -> int:
    """Return how many of the smallest and of the largest values lie outside of the interval of the median."""
    left_out, tail = 0, 2.0 * 0.5**number
    while left_out + 1 < number / 2 and (tail := tail + 2.0 * math.comb(number, left_out + 1) * 0.5**number) <= 0.05:
        left_out += 1
    return left_out


def run(checkout: Path, words: Sequence[str]) -> dict[str, Figure]:
    """Run the benchmark there; return its figures by case. SystemExit if it fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])}
    child = subprocess.Popen(
        [sys.executable, *words], cwd=checkout, env=environment, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
    )
    lines: list[Line] = []
    assert child.stdout is not None
    at_s, used_s = time.monotonic(), 0.0
    for line in child.stdout:
        now_s, now_used_s = time.monotonic(), cpu_s(child.pid)
        lines.append(Line(json.loads(line), now_s - at_s, now_used_s - used_s))
        at_s, used_s = now_s, now_used_s
    if child.wait():
        raise SystemExit(f"_pairs: {' '.join(words)} in {checkout} ended with status {child.returncode}")
    return figures(lines)


def figures(lines: Sequence[Line]) -> dict[str, Figure]:
    """Return the figures of a run by case. Where the lines came together at the end, the processor time is that of the
    whole run, which is the same work in both checkouts, and stands as a case of its own.
    """
    together = statistics.median(line.seconds for line in lines) < _LEAST_GAP_S
    rates = [(line, rate) for line in lines if (rate := _rate(line.fields)) is not None]
    found = {line.fields["case"]: Figure(rate, None if together else _cost(line, rate)) for line, rate in rates}
    if together:
        found["processor time of the whole run"] = Figure(1 / sum(line.cpu_s for line in lines), None)
    return found


def _cost(line: Line, rate: float) -> float | None:
    return line.cpu_s / (rate * line.seconds) if line.cpu_s >= _LEAST_CPU_S else None


def _rate(fields: dict[str, Any]) -> float | None:
    """Return the figure so that more is better; None if it has no direction."""
    better, value = better_of(fields["unit"]), fields["value"]
    if better is None or not value:
        return None
    return float(value if better == "larger" else 1 / value)


def cpu_s(root: int) -> float:
    """Return the processor time of this process and of all below it, those included that they have waited for."""
    parents, used = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        pid = int(stat.parent.name)
        parents[pid], used[pid] = int(words[1]), sum(int(word) for word in words[11:15])
    return sum(used[pid] for pid in used if _is_below(pid, root, parents)) / _TICKS_PER_S


def _is_below(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid != root and pid in parents:
        pid = parents[pid]
    return pid == root


def measure(old: Path, new: Path, words: Sequence[str], num_pairs: int) -> list[Pair]:
    """Return the figures of (old, new) of each pair."""
    pairs = []
    for number in range(num_pairs):
        order = (old, new) if number % 2 == 0 else (new, old)
        runs = {checkout: run(checkout, words) for checkout in order}
        pairs.append((runs[old], runs[new]))
    return pairs


def report(pairs: Sequence[Pair], given: argparse.Namespace) -> bool:
    """Print each case; return whether all are as fast as allowed."""
    lines, ok = BenchReport("pairs", as_json=given.json), True
    speeds: dict[str, list[float]] = defaultdict(list)
    costs: dict[str, list[float]] = defaultdict(list)
    for old, new in pairs:
        for case in {**old, **new}:
            speeds[case] += [new[case].rate / old[case].rate] if case in old and case in new else []
            costs[case] += _cpu_ratio(old.get(case), new.get(case))
    for case, ratios in speeds.items():
        if len(ratios) < len(pairs):
            lines.add(case, None, "of the old speed", text=f"{case}: not in every run of both")
            ok = False
            continue
        speed, cpu = kept(ratios), kept(costs[case]) if costs[case] else None
        lines.add(
            case, speed.median, "of the old speed", interval=_rounded(speed[1:]), ok=speed.high >= given.allow,
            cpu=None if cpu is None else round(cpu.median, 3), cpu_interval=cpu and _rounded(cpu[1:]),
        )  # fmt: skip
        ok = ok and speed.high >= given.allow
    return ok


def _cpu_ratio(old: Figure | None, new: Figure | None) -> list[float]:
    if old is None or new is None or old.cpu_per_operation is None or new.cpu_per_operation is None:
        return []
    return [old.cpu_per_operation / new.cpu_per_operation]


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 3) for value in values]


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--old", type=Path, required=True, help="checkout to compare with")
    parser.add_argument("--new", type=Path, default=Path(), help="checkout in question (default: this folder)")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--allow", type=float, default=0.97, help="share of the old speed that must be kept")
    parser.add_argument("words", nargs="+", metavar="ARGUMENT", help="of Python, behind --")
    given = parser.parse_args()
    pairs = measure(given.old.resolve(), given.new.resolve(), given.words, given.pairs)
    return 0 if report(pairs, given) else 1


if __name__ == "__main__":
    sys.exit(main())
