"""How all benchmarks report their figures: one line each, as text or JSON, and on demand appended to a history.

The files of benchmarks/ and `moonpool bench` share the options `--json`, `--record` and `--history`. What is recorded
beside a figure tells which code was measured and on which machine; `moonpool bench compare` reads it (history.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from moonpool import __version__
from moonpool.base.errors import InvalidInput
from moonpool.bench.history import Better, HistoryLine, better_of

HISTORY = Path("build/bench/history.jsonl")
JSON_HELP = "print one JSON object per line"
RECORD_HELP = "append each figure to the history"
HISTORY_HELP = "file of the history, a JSON object per line"
QUICK_NOT_RECORDED = "the figures of --quick mean nothing and are not recorded"
_CHECKOUT = Path(__file__).resolve().parents[2]
_NUM_STEPS, _NUM_LOOPS = 100_000, 20
_CPU_FIELDS = ("model name", "CPU implementer", "CPU part")  # x86 has the first, Arm the others


class RunFacts(NamedTuple):
    """Which code ran, and on which machine."""

    commit: str
    cpu: str
    cores: int
    speed: float


class BenchReport:
    """Prints the figures of one benchmark and, if `history` is given, appends them to that file. InvalidInput if the
    file cannot be written.
    """

    def __init__(self, bench: str, *, as_json: bool, history: Path | None = None) -> None:
        self.as_json = as_json
        self._bench = bench
        self._history = history
        self._facts: RunFacts | None = None
        if history is not None:
            _append(history, b"")  # fails before anything is measured
            self._facts = run_facts()

    @classmethod
    def from_options(cls, bench: str, options: argparse.Namespace) -> BenchReport:
        """For programs whose options come from bench_parser(). SystemExit if nothing can be recorded."""
        if options.record and getattr(options, "quick", False):
            raise SystemExit(f"{bench}: {QUICK_NOT_RECORDED}")
        try:
            return cls(bench, as_json=options.json, history=options.history if options.record else None)
        except InvalidInput as error:
            raise SystemExit(f"{bench}: {error}") from error

    def add(
        self,
        case: str,
        value: float | None,
        unit: str,
        baseline: float | None = None,
        *,
        ratio: float | None = None,
        at_least: float | None = None,
        at_most: float | None = None,
        compared: bool = True,
        text: str | None = None,
        **more: object,
    ) -> None:
        """Report a figure. A case has one figure per run; None: it could not be measured. `ratio` is by default that of
        value and baseline. `at_least` or `at_most` is the target. False for `compared` if the figure must not be
        compared with those of earlier commits. People are shown `text` if it is given. `more` stands behind the rest.
        """
        if ratio is None and value is not None and baseline:
            ratio = value / baseline
        target = at_most if at_least is None else at_least
        if target is not None and value is not None:
            more = {"target": target, "ok": value <= target if at_least is None else value >= target, **more}
        value, ratio = _rounded(value), _rounded(ratio)
        figures = {"value": value, "unit": unit, "baseline": _rounded(baseline), "ratio": ratio}
        fields = {"bench": self._bench, "case": case, **figures, **more}
        print(json.dumps(fields) if self.as_json else text or _as_text(fields), flush=True)
        if value is not None:
            self._record(case, value, unit, ratio, better_of(unit) if compared else None)

    def _record(self, case: str, value: float, unit: str, ratio: float | None, better: Better | None) -> None:
        if self._history is None or self._facts is None:
            return
        line = HistoryLine(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            bench=self._bench,
            case=case,
            value=value,
            unit=unit,
            ratio=ratio,
            better=better,
            **self._facts._asdict(),
        )
        _append(self._history, msgspec.json.encode(line) + b"\n")


def bench_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    parser.add_argument("--record", action="store_true", help=RECORD_HELP)
    parser.add_argument("--history", type=Path, default=HISTORY, help=f"{HISTORY_HELP} (default: {HISTORY})")
    return parser


def read_history(path: Path) -> list[HistoryLine]:
    """Return the figures in the order in which they were recorded. InvalidInput if there is no such file or a line of
    it is not a figure.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidInput(
            f"there is no history at {path} ({error.strerror}); run a benchmark with --record"
        ) from error
    try:
        return msgspec.json.Decoder(HistoryLine).decode_lines(raw)
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"{path} is not a history of benchmarks: {error}") from error


def _append(path: Path, line: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:  # one write: runs side by side do not mix their lines
            file.write(line)
    except OSError as error:
        raise InvalidInput(f"cannot write the history {path}: {error.strerror}") from error


def run_facts() -> RunFacts:
    return RunFacts(_commit(), _cpu(), len(os.sched_getaffinity(0)), _speed())


def _commit() -> str:
    """Return the commit of this checkout, with a digest of what was changed since; outside of one the version."""
    if not (_CHECKOUT / ".git").exists():
        return __version__
    commit, changes = (
        subprocess.run(["git", "-C", str(_CHECKOUT), *command], capture_output=True, check=True).stdout
        for command in (["rev-parse", "--short=12", "HEAD"], ["diff", "HEAD"])
    )
    digest = hashlib.blake2b(changes, digest_size=4).hexdigest()
    return commit.decode().strip() + (f"+{digest}" if changes else "")


def _cpu() -> str:
    """Return the architecture and the model of the first processor."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    found = dict([part.strip() for part in line.split(":", 1)] for line in lines if ":" in line)
    return " ".join([platform.machine(), *[found[name] for name in _CPU_FIELDS if name in found]])


def _speed() -> float:
    """Return how many million steps of a fixed loop this processor does per second, the best of some attempts."""
    times_s = []
    for _ in range(_NUM_LOOPS):
        started_s = time.perf_counter()
        total = 0
        for step in range(_NUM_STEPS):
            total += step & 7
        times_s.append(time.perf_counter() - started_s)
    return round(_NUM_STEPS / min(times_s) / 1e6, 2)


def _rounded(value: float | None) -> float | None:
    """Return the figure as it is printed; None for one that is not finite."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _as_text(fields: dict[str, Any]) -> str:
    value, baseline, ratio = (_shown(fields[name]) for name in ("value", "baseline", "ratio"))
    beside = "" if fields["baseline"] is None else f"  ({baseline}, ratio {ratio})"
    more = ", ".join(f"{name} {fields[name]}" for name in list(fields)[6:] if fields[name] not in ("", None))
    return f"{fields['case']:<60} {value:>12} {fields['unit']}{beside}{more and f'  {more}'}"


def _shown(value: float | None) -> str:
    return "-" if value is None else format(value, ",.0f" if abs(value) >= 1000 else ".4g")
