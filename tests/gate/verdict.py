"""What the gate makes of one run of the tests, and of a second run of those that failed. No I/O.

The rule: one test may need a second run. The gate fails at the second such test, at any that is listed as unsteady
already, and at any failure that no slow host explains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any

MOST_REPEATED = 20  # with more failures than that a second run tells nothing
EXIT_STATUS = {2: "interrupted", 3: "an error inside pytest", 4: "wrong usage", 5: "no test was found"}
_RANKS = ("unfinished", "passed", "skipped", "failed")  # of the phases of a test, the highest is its outcome


@dataclass(frozen=True)
class Failure:
    """The first failure of a test."""

    name: str
    line: str
    severe: str | None  # the name of its class, if it is one of tests/helpers/severe.py


@dataclass
class Run:
    """What one run of pytest left. `broken` says why its outcomes are not all of the truth."""

    outcomes: dict[str, str] = field(default_factory=dict)  # by test: one of _RANKS
    failures: dict[str, Failure] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by file
    num_tests: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by file
    broken: list[str] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        return sum(each == outcome for each in self.outcomes.values())


@dataclass
class Verdict:
    reasons: list[str]  # why the gate fails; none: it is passed
    second_run: list[Failure]  # what passed on the second run
    num_passed: int
    num_failed: int
    num_skipped: int

    @property
    def closing_line(self) -> str:
        return f"{self.num_passed} passed, {self.num_failed} failed, {self.num_skipped} skipped"


def read_run(events: Iterable[dict[str, Any]], exit_status: int) -> Run:
    """`events` are the lines that outcomes.py wrote."""
    run, has_ended = Run(), False
    for event in events:
        match event["kind"]:
            case "phase":
                _add_phase(run, event)
            case "collect":
                run.broken.append(f"cannot be collected: {event['name']}: {event['line']}")
            case "crash":
                run.broken.append(f"process {event['name']} of the tests died: {event['line']}")
            case "end":
                has_ended = True
                if event["stopped"]:
                    run.broken.append(f"the run was stopped early: {event['stopped']}")
    if exit_status not in (0, 1):
        run.broken.append(f"pytest ended with {exit_status}: {EXIT_STATUS.get(exit_status, 'killed')}")
    elif not has_ended:
        run.broken.append(f"pytest ended with {exit_status} before its tests had ended")
    elif exit_status == 1 and not run.failures and not run.broken:
        run.broken.append("pytest ended with 1 although no test failed")
    return run


def _add_phase(run: Run, event: dict[str, Any]) -> None:
    name, outcome = event["name"], event["outcome"]
    file = name.split("::")[0]
    run.seconds[file] += event["seconds"]
    if name not in run.outcomes:
        run.num_tests[file] += 1
    if outcome == "passed" and event["when"] != "teardown":
        outcome = "unfinished"
    run.outcomes[name] = max(run.outcomes.get(name, "unfinished"), outcome, key=_RANKS.index)
    if outcome == "failed":
        run.failures.setdefault(name, Failure(name, event["line"], event["severe"]))


def deserves_second_run(run: Run) -> bool:
    return not run.broken and 0 < len(run.failures) <= MOST_REPEATED


def judge(first: Run, second: Run | None, listed: Set[str]) -> Verdict:
    """`second` is None when there was no second run; `listed` are the names in tests/known_unsteady.txt."""
    failures = list(first.failures.values())
    mended = [] if second is None else [each for each in failures if second.outcomes.get(each.name) == "passed"]
    reasons = list(first.broken)
    if second is not None:
        reasons += [f"in the second run: {each}" for each in second.broken]
    how = "failed" if second is None else "failed twice"
    reasons += [f"{how}: {each.name}: {each.line}" for each in failures if each not in mended]
    if len(mended) > 1:
        reasons.append(f"{len(mended)} tests needed a second run; one may")
    for each in failures:
        if each.severe:
            reasons.append(f"no second chance after {each.severe}: {each.name}: {each.line}")
        if each.name in listed:
            reasons.append(f"failed its first run and is listed as unsteady: {each.name}")
    return Verdict(
        reasons, mended, first.count("passed") + len(mended), len(failures) - len(mended), first.count("skipped")
    )
