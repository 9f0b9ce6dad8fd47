"""Plants a known fault in a copy of the package, and demands that the tests named for it fail there.

    python -m tests.gate.planted [NAME...] [--list]

The faults are in planted_faults.py. The package is copied into a temporary folder, the fault is written there, and
pytest runs the named tests of this repository in that folder, with PYTHONPATH set so that the tests and the processes
that they start import the copy. This module is also a plugin of that pytest, which checks that they do. (A process that
a test starts by `python -m` in the repository's root imports the repository's package all the same.)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from .planted_faults import FAULTS, Fault
from .verdict import Run, read_run

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "moonpool"
_COPY = "MOONPOOL_PLANTED_COPY"  # for the plugin: where the package must come from
_WHERE = "import moonpool; print(moonpool.__file__)"


class MisfitError(Exception):
    """A fault no longer fits the code: its author has to look at what became of the place."""


@dataclass(frozen=True)
class Found:
    """What the named tests said of one fault."""

    tests: Sequence[str]
    run: Run
    seconds: float
    output: str

    @property
    def problem(self) -> str | None:
        """Why this does not count as found."""
        if self.run.broken:
            return "; ".join(self.run.broken)
        blind = [test for test in self.tests if not any(_is_of(name, test) for name in self.run.failures)]
        return f"not noticed by {', '.join(blind)}" if blind else None


def _is_of(name: str, test: str) -> bool:
    """Return whether the test is the named one, or one of its cases."""
    return name == test or name.startswith(f"{test}[")


def edited(fault: Fault, package: Path = PACKAGE) -> Mapping[str, str]:
    """Return the texts of the files with the fault. Raise MisfitError unless each old text is there exactly once."""
    texts: dict[str, str] = {}
    for file, old, new in fault.edits:
        path = package / file
        text = texts.get(file) or (path.read_text() if path.exists() else "")
        count = text.count(old)
        if count != 1:
            raise MisfitError(f"{fault.name} no longer fits the code: {file} has {count} times {old!r}")
        texts[file] = text.replace(old, new)
    return texts


def plant(fault: Fault, folder: Path) -> Path:
    """Copy the package into the folder, with the fault. Return the copy."""
    texts, copy = edited(fault), folder / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in texts.items():
        (copy / file).write_text(text)
    return copy


def run_tests(tests: Sequence[str], copy: Path) -> Found:
    """Run these tests of the repository on the copy, in its folder: `python -m` and `python -c` look there first."""
    events = copy.parent / "outcomes.jsonl"
    events.touch()
    options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    plugins = ["-p", "tests.gate.outcomes", f"--gate-outcomes={events}", "-p", "tests.gate.planted"]
    command = [sys.executable, "-m", "pytest", *options, *plugins, *(str(ROOT / test) for test in tests)]
    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (str(copy.parent), before, str(ROOT))))
    env = os.environ | {"PYTHONPATH": path, _COPY: str(copy)}
    started_s = time.monotonic()
    done = subprocess.run(command, cwd=copy.parent, env=env, capture_output=True, text=True)
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    run = read_run(lines, done.returncode)
    if not lines:  # pytest did not come so far
        run.broken.append(done.stderr.strip()[-500:])
    return Found(tests, run, time.monotonic() - started_s, done.stdout + done.stderr)


def look(fault: Fault) -> Found:
    """Plant the fault and run its tests. Raise MisfitError."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        return run_tests(fault.tests, plant(fault, Path(folder)))


def look_at_nothing(tests: Sequence[str]) -> Found:
    """Run tests on a copy without a fault: what fails there finds nothing."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = plant(Fault("nothing", "no fault at all", (), tuple(tests)), Path(folder))
        return run_tests(tests, copy)


# As a plugin of the pytest that runs the named tests.


def pytest_sessionstart(session: pytest.Session) -> None:
    """End the run unless this process and one that it starts import the copy."""
    copy = os.environ.get(_COPY)
    if copy is None:
        return
    wanted = str(Path(copy) / "__init__.py")
    child = subprocess.run([sys.executable, "-c", _WHERE], check=True, capture_output=True, text=True).stdout.strip()
    import moonpool

    if {moonpool.__file__, child} != {wanted}:
        pytest.exit(f"the tests import {moonpool.__file__}, their processes {child}, and not {wanted}", returncode=4)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests.gate.planted", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant; default: all")
    parser.add_argument("--list", action="store_true", help="only list the faults")
    parser.add_argument("--output", action="store_true", help="print what pytest printed")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - FAULTS.keys()
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    chosen = [FAULTS[name] for name in options.names] or list(FAULTS.values())
    if options.list:
        for fault in chosen:
            print(f"{fault.name}: {fault.why}\n  {'  '.join(fault.tests)}")
        return 0
    missed = [fault.name for fault in chosen if not say(fault, print_output=options.output)]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults were found{': not ' * bool(missed)}{', '.join(missed)}")
    return 1 if missed else 0


def say(fault: Fault, *, print_output: bool) -> bool:
    """Plant the fault and print who found it. Return whether somebody did."""
    try:
        found = look(fault)
    except MisfitError as error:
        print(error, flush=True)
        return False
    if print_output:
        print(found.output)
    told = found.problem or "found by"
    print(f"{fault.name}, {found.seconds:.0f} s: {told}", flush=True)
    for failure in found.run.failures.values():
        print(f"  {failure.name}: {failure.line}", flush=True)
    return found.problem is None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
