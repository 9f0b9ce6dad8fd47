"""Runs the tests once, repeats those that failed once, alone, and says whether the gate is passed.

    python -m tests.gate.run [--name NAME] -- PYTEST-ARGUMENTS...

verdict.py has the rule. What passed on the second run is printed at the end and appended to build/gate/second-run.txt;
the times of the files are kept in build/gate/durations.json and compared with those of the last run of this name.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from .child import run_to_end
from .durations import from_json, measured, slower, slowest, to_json
from .verdict import Run, Verdict, deserves_second_run, judge, read_run

KNOWN_UNSTEADY = Path(__file__).parents[1] / "known_unsteady.txt"


def main(arguments: Sequence[str]) -> int:
    options, pytest_arguments = parse(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gate-") as folder:
        first = run_pytest(pytest_arguments, Path(folder))
        second = repeat(pytest_arguments, first, Path(folder)) if deserves_second_run(first) else None
    verdict = judge(first, second, read_listed(options.known))
    say_durations(first, options.folder / "durations.json", options.name)
    note_second_run(verdict, options.folder / "second-run.txt")
    for reason in verdict.reasons:
        say(f"the gate fails: {reason}")
    say(f"the gate took {time.monotonic() - started_s:.0f} s")
    say(verdict.closing_line)
    return 1 if verdict.reasons else 0


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="tests.gate.run", usage="%(prog)s [options] -- PYTEST-ARGUMENTS...")
    parser.add_argument("--name", default="test", help="whose durations these are")
    parser.add_argument("--folder", type=Path, default=Path("build/gate"), help="what one run leaves for the next")
    parser.add_argument("--known", type=Path, default=KNOWN_UNSTEADY, help="the list of unsteady tests")
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    return parser.parse_args(arguments[:at]), list(arguments[at + 1 :])


def run_pytest(arguments: Sequence[str], folder: Path) -> Run:
    """Its output goes where ours goes. At SIGINT its tests end what they started.

    A value of our options is joined to its name: pytest looks for its configuration before it knows them, and would
    take a word of its own for a path to test.
    """
    path = folder / "outcomes.jsonl"
    path.write_text("")
    command = [sys.executable, "-m", "pytest", "-p", "tests.gate.outcomes", f"--gate-outcomes={path}", *arguments]
    sys.stdout.flush()
    exit_status = run_to_end(command, signal.SIGINT)
    return read_run(map(json.loads, path.read_text().splitlines()), exit_status)


def repeat(arguments: Sequence[str], first: Run, folder: Path) -> Run:
    """Only what failed, in one process, one after the other."""
    names = folder / "failed.json"
    names.write_text(json.dumps(list(first.failures)))
    say(f"the gate repeats what failed, alone: {len(first.failures)}")
    return run_pytest([*arguments, "-n", "0", f"--gate-only={names}"], folder)


def read_listed(path: Path) -> set[str]:
    lines = (line.strip() for line in path.read_text().splitlines())
    return {line for line in lines if line and not line.startswith("#")}


def say_durations(run: Run, path: Path, name: str) -> None:
    """Files that were not run keep the times that they had."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    before, now = from_json(kept.get(name, {})), measured(run.seconds, run.num_tests)
    say("the slowest files:")
    for line in slowest(now):
        say(line)
    for line in slower(before, now):
        say(line)
    if not run.broken:
        kept[name] = to_json(before | now)
        path.write_text(json.dumps(kept, indent=1) + "\n")


def note_second_run(verdict: Verdict, path: Path) -> None:
    if not verdict.second_run:
        return
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with path.open("a") as notes:
        for failure in verdict.second_run:
            line = f"passed on the second run: {failure.name}, first failure: {failure.line}"
            say(line)
            notes.write(f"{when} {line}\n")
    say(f"the next commit adds these names to {KNOWN_UNSTEADY.relative_to(KNOWN_UNSTEADY.parents[1])}")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
