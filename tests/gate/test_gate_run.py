"""The gate on folders of tiny tests: what it repeats, what it says, and when it fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from .durations import FileTime, slower

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
ONCE = """
from pathlib import Path

def once(name):
    "Whether this is the first time that anybody asks."
    flag = Path(__file__).with_name(name)
    is_first = not flag.exists()
    flag.touch()
    return is_first
"""
GOOD = "def test_good():\n    pass\n"
UNSTEADY = ONCE + "def test_unsteady():\n    assert not once('a'), 'the first time'\n"
BAD = "def test_bad():\n    assert 1 == 2, 'always'\n"


@dataclass
class Gate:
    folder: Path
    listed: tuple[str, ...] = ()

    def run(self, files: dict[str, str], *arguments: str) -> tuple[int, list[str]]:
        """Its exit status, and what it printed."""
        for name, text in files.items():
            (self.folder / name).write_text(text)
        settings = f"[pytest]\npythonpath = {HELPERS}\naddopts = -q -p no:cacheprovider\n"
        (self.folder / "pytest.ini").write_text(settings)
        known = self.folder / "known.txt"
        known.write_text("# the rule\n\n" + "\n".join(self.listed) + "\n")
        own = ["--folder", str(self.folder / "kept"), "--known", str(known)]
        to_pytest = ["-p", "xdist", "-c", str(self.folder / "pytest.ini"), str(self.folder), *arguments]
        command = [sys.executable, "-m", "tests.gate.run", *own, "--", *to_pytest]
        env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # pytest starts in half the time
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
        return done.returncode, done.stdout.splitlines()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def reasons(lines: list[str]) -> list[str]:
    return [line.removeprefix("the gate fails: ") for line in lines if line.startswith("the gate fails: ")]


def second_runs(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("passed on the second run: ")]


def test_all_is_well(gate: Gate) -> None:
    skipped = "import pytest\ndef test_skipped():\n    pytest.skip('no such machine')\n"
    status, lines = gate.run({"test_a.py": GOOD, "test_b.py": skipped})
    assert (status, lines[-1]) == (0, "1 passed, 0 failed, 1 skipped")
    assert reasons(lines) == second_runs(lines) == []
    assert re.fullmatch(r"the gate took \d+ s", lines[-2])
    assert any(re.fullmatch(r" +\d+\.\d s  test_a\.py", line) for line in lines), "the slowest files"


@pytest.mark.parametrize("arguments", [(), ("-n", "2", "--dist", "loadgroup")])
def test_one_unsteady_test_passes_and_is_named(gate: Gate, arguments: tuple[str, ...]) -> None:
    grouped = UNSTEADY.replace("def test", "import pytest\n@pytest.mark.xdist_group('g')\ndef test")
    status, lines = gate.run({"test_a.py": GOOD, "test_b.py": grouped}, *arguments)
    assert (status, lines[-1]) == (0, "2 passed, 0 failed, 0 skipped")
    said = "passed on the second run: test_b.py::test_unsteady, first failure: AssertionError: the first time"
    assert second_runs(lines) == [said]
    assert (gate.folder / "kept" / "second-run.txt").read_text().endswith(f"Z {said}\n")
    assert lines.count("1 passed in 0.00s") <= 1, "only what failed is repeated"
    assert "the gate repeats what failed, alone: 1" in lines


def test_a_second_unsteady_test_fails_the_gate(gate: Gate) -> None:
    other = UNSTEADY.replace("once('a')", "once('b')").replace("test_unsteady", "test_other")
    status, lines = gate.run({"test_a.py": UNSTEADY, "test_b.py": other})
    assert (status, lines[-1]) == (1, "2 passed, 0 failed, 0 skipped")
    assert len(second_runs(lines)) == 2
    assert reasons(lines) == ["2 tests needed a second run; one may"]


def test_what_fails_twice_fails_the_gate(gate: Gate) -> None:
    status, lines = gate.run({"test_a.py": GOOD, "test_b.py": BAD})
    assert (status, lines[-1]) == (1, "1 passed, 1 failed, 0 skipped")
    assert reasons(lines) == ["failed twice: test_b.py::test_bad: AssertionError: always"]


def test_a_listed_test_has_no_second_chance(gate: Gate) -> None:
    gate.listed = ("test_a.py::test_unsteady",)
    status, lines = gate.run({"test_a.py": UNSTEADY})
    assert (status, len(second_runs(lines))) == (1, 1)
    assert reasons(lines) == ["failed its first run and is listed as unsteady: test_a.py::test_unsteady"]


SEVERE = {
    "WrongBytes": "check_bytes(b'ab', b'ac', 'page 3')",
    "WrongToken": "check_tokens([1, 2], [1, 3], 'the answer')",
    "LeftoverProcess": "check_no_process([17])",
    "LostObject": "raise LostObject('key 3')",
}

IN_A_CHILD = f"""{ONCE}
import subprocess, sys
def test_child():
    if once('child'):
        path = 'import sys; sys.path.append("{HELPERS}")'
        subprocess.run([sys.executable, '-c', path + "; from severe import *; check_bytes(b'a', b'b')"], check=True)
"""


def test_a_severe_failure_has_no_second_chance(gate: Gate) -> None:
    tests = [f"def test_{kind}():\n    if once('{kind}'):\n        {call}\n" for kind, call in SEVERE.items()]
    status, lines = gate.run({"test_a.py": ONCE + "from severe import *\n" + "".join(tests), "test_b.py": IN_A_CHILD})
    assert (status, lines[-1]) == (1, "5 passed, 0 failed, 0 skipped")
    found = [each.split(": ")[:2] for each in reasons(lines) if "no second chance" in each]
    wanted = [[f"no second chance after {kind}", f"test_a.py::test_{kind}"] for kind in SEVERE]
    assert found == [*wanted, ["no second chance after WrongBytes", "test_b.py::test_child"]]


def test_a_severe_failure_is_found_in_a_group_and_behind_another_under_xdist(gate: Gate) -> None:
    test = f"""{ONCE}
from severe import WrongBytes
def test_a():
    if once('a'):
        try:
            raise ExceptionGroup('several', [ValueError(), WrongBytes('page 3')])
        except ExceptionGroup as error:
            raise RuntimeError('a task failed') from error
"""
    status, lines = gate.run({"test_a.py": test}, "-n", "2")
    assert status == 1
    assert reasons(lines) == ["no second chance after WrongBytes: test_a.py::test_a: RuntimeError: a task failed"]


def test_what_fails_in_its_fixtures_is_repeated_too(gate: Gate) -> None:
    fixtures = f"""{ONCE}
import pytest
@pytest.fixture
def begins():
    assert not once('a'), 'set-up'
@pytest.fixture
def ends():
    yield
    assert not once('b'), 'the end'
def test_a(begins):
    pass
def test_b(ends):
    pass
"""
    _, lines = gate.run({"test_a.py": fixtures})
    assert [line.rpartition(": ")[2] for line in second_runs(lines)] == ["set-up", "the end"]
    assert lines[-1] == "2 passed, 0 failed, 0 skipped"


EXIT_1 = """import pytest
@pytest.fixture(autouse=True)
def spoil(request):
    yield
    request.session.testsfailed = 1
"""
NOT_WHOLE: dict[str, tuple[str, tuple[str, ...], str]] = {
    "a process died": (ONCE + "import os\ndef test_a():\n    once('a') and os._exit(3)\n", ("-n", "2"), "process gw"),
    "an import fails": (
        "import no_such_module\n",
        (),
        "cannot be collected: test_a.py: ModuleNotFoundError",
    ),
    "interrupted": ("def test_a():\n    raise KeyboardInterrupt\n", (), "pytest ended with 2: interrupted"),
    "wrong usage": (GOOD, ("--no-such-option",), "pytest ended with 4: wrong usage"),
    "no test": (GOOD, ("-k", "nothing"), "pytest ended with 5: no test was found"),
    "ended": ("import os\ndef test_a():\n    os._exit(1)\n", (), "pytest ended with 1 before its tests had ended"),
    "stopped": (UNSTEADY + GOOD, ("-x",), "the run was stopped early: stopping after 1 failures"),
    "1 without a failure": (EXIT_1 + GOOD, (), "pytest ended with 1 although no test failed"),
}


@pytest.mark.parametrize("what", NOT_WHOLE)
def test_a_run_that_is_not_whole_has_no_second_chance(gate: Gate, what: str) -> None:
    text, arguments, reason = NOT_WHOLE[what]
    status, lines = gate.run({"test_a.py": text}, *arguments)
    assert status == 1
    assert any(each.startswith(reason) for each in reasons(lines)), lines
    assert re.fullmatch(r"\d passed, \d failed, 0 skipped", lines[-1])
    assert not any("repeats" in line for line in lines)
    assert not (gate.folder / "kept" / "durations.json").exists(), "its durations are not kept"


def test_many_failures_are_not_repeated(gate: Gate) -> None:
    many = "import pytest\n@pytest.mark.parametrize('n', range(21))\ndef test_a(n):\n    assert n < 0\n"
    status, lines = gate.run({"test_a.py": many})
    assert (status, lines[-1], len(reasons(lines))) == (1, "0 passed, 21 failed, 0 skipped", 21)
    assert not any("repeats" in line for line in lines)


def test_files_that_became_slower_are_named() -> None:
    before = {"a": FileTime(10.0, 3), "b": FileTime(10.0, 3), "c": FileTime(1.0, 3), "gone": FileTime(1.0, 1)}
    now = {"a": FileTime(12.1, 4), "b": FileTime(12.0, 3), "c": FileTime(2.0, 3), "new": FileTime(9.0, 1)}
    assert list(slower(before, now)) == ["slower: a: 12.1 s for 4 tests, before 10.0 s for 3"]


def test_durations_are_kept_by_name(gate: Gate) -> None:
    kept = gate.folder / "kept" / "durations.json"
    kept.parent.mkdir()
    old = {"seconds": -1.0, "num_tests": 7}
    kept.write_text(json.dumps({"test": {"test_a.py": old, "test_gone.py": old}, "quick": {"test_a.py": old}}))
    assert gate.run({"test_a.py": GOOD})[0] == 0
    found = json.loads(kept.read_text())
    assert found["test"]["test_a.py"]["num_tests"] == 1
    assert found["test"]["test_a.py"]["seconds"] >= 0.0
    assert (found["test"]["test_gone.py"], found["quick"]) == (old, {"test_a.py": old}), "what was not run stays"
