"""The scan finds planted tests without a check, and accepts those that have one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from .scan import Scan, listed_but_gone

ROOT = Path(__file__).parents[2]
# What the tests below may refer to.
HELPER = """
import contextlib, pytest
class Judge:
    def judge(self, thing): assert thing.is_right
    def look(self, thing): return thing.is_right
class Strict(Judge):
    def both(self, thing): self.judge(thing)
class WrongAnswer(AssertionError): pass
def check(thing): assert thing.is_right
def check_deep(thing): [check(each) for each in thing]
def complain(thing):
    if not thing.is_right: raise WrongAnswer('so')
def touch(thing): thing.touch()
@pytest.fixture
def checked(thing):
    check(thing)
    return thing
@pytest.fixture
def checker():
    def inner(thing): assert thing.is_right
    return inner
"""
BAD = {
    "nothing": "def test_it(thing): thing.do()",
    "async": "async def test_it(thing): await thing.do()",
    "a method": "class TestAll:\n    def test_it(self, thing): thing.do()",
    "a constant": "def test_it(thing):\n    thing.do()\n    assert True",
    "constants": "def test_it(thing):\n    thing.do()\n    assert 1 + 1 == 2, thing",
    "own names": "def test_it(thing):\n    limit, names = 5, ['a', 'b']\n    thing.do()\n    assert len(names) < limit",
    "own sums": "def test_it():\n    total = 0\n    for n in range(5): total += n\n    assert sum([1]) < total",
    "own lists": "def test_it():\n    found = [n * n for n in (1, 2)]\n    assert {'a': 4}['a'] in sorted(found)",
    "own text": "def test_it():\n    name = 'a' + 'b'\n    assert f'{name}!'.upper().startswith('A')",
    "a constant of the module": "LIMIT = (1, 2)\ndef test_it(thing):\n    thing.do()\n    assert LIMIT[0] < 2",
    "parameters written down": """
        @pytest.mark.parametrize(('a', 'b'), [(1, 2), (3, 4)])
        def test_it(thing, a, b):
            thing.do(a, b)
            assert a < b
    """,
    "a helper that looks at nothing": "def test_it(thing): touch(thing)",
    "a method that looks at nothing": "def test_it(thing): Judge().look(thing)",
    "a method of another class": """
        def test_it(thing):
            judge = Path(thing)
            judge.judge(thing)
    """,
    "a helper that nobody calls": "def test_it(thing):\n    def inner(): assert thing.x\n    thing.do()",
    "a fixture's own check": "def test_it(checked): checked.do()",
    "a caught check": """
        def test_it(thing):
            try:
                assert thing.is_right
            except AssertionError:
                thing.note()
    """,
    "a caught helper": "def test_it(thing):\n    with contextlib.suppress(ValueError, Exception): check(thing)",
    "a raise of something else": "def test_it(thing):\n    if thing.x: raise thing.Stop()",
    "run without check": "def test_it(thing): subprocess.run(['false'], check=False)",
}
GOOD = {
    "assert": "def test_it(thing): assert thing.is_right",
    "assert of an answer": "def test_it(thing):\n    found = thing.ask()\n    assert found == 5",
    "assert of a parameter that is made": """
        @pytest.mark.parametrize('a', [thing(1), thing(2)])
        def test_it(a): assert a
    """,
    "a list that is handed out": "def test_it(thing):\n    seen = []\n    thing.tell(seen)\n    assert seen == [1]",
    "a list that a function fills": """
        def test_it(thing):
            seen = {}
            def note(key): seen[key] = 1
            thing.tell(note)
            assert seen == {'a': 1}
    """,
    "a number that a function counts": """
        def test_it(thing):
            count = 0
            def note():
                nonlocal count
                count += 1
            thing.tell(note)
            assert count == 1
    """,
    "a name bound again": "def test_it(thing):\n    found = None\n    found = thing.ask()\n    assert found == 1",
    "raises": "def test_it(thing):\n    with pytest.raises(ValueError): thing.do()",
    "raise": "def test_it(thing):\n    if thing.x: raise AssertionError('x')",
    "raise of a class made from it": "def test_it(thing): complain(thing)",
    "a helper": "def test_it(thing): check_deep(thing)",
    "a helper by its module": "import helper\ndef test_it(thing): helper.check(thing)",
    "a method": "def test_it(thing): Judge().judge(thing)",
    "a method of a base class": "def test_it(thing):\n    judge = Strict()\n    judge.both(thing)",
    "a method of a fixture": "def test_it(thing, judge): judge.judge(thing)",
    "a function that a fixture makes": "def test_it(thing, checker): checker(thing)",
    "a helper handed out": "def test_it(thing): thing.tell(check)",
    "check=True": "def test_it(): subprocess.run(['true'], check=True)",
    "expect": "def test_it(page): expect(page.locator('a')).to_be_visible()",
    "numpy": "def test_it(a, b): np.testing.assert_allclose(a, b)",
    "unittest": "class TestAll(TestCase):\n    def test_it(self): self.assertEqual(self.thing.x, 1)",
    "status": "def test_it(client): client.get('/').raise_for_status()",
    "a caught check with another behind it": """
        def test_it(thing):
            try:
                check(thing)
            except AssertionError:
                pytest.fail('no')
    """,
}
IMPORTS = "import pytest, contextlib, subprocess\nfrom pathlib import Path\n"
FROM_HELPER = "from helper import Judge, Strict, check, check_deep, checked, checker, complain, touch\n"


def found_in(folder: Path, source: str) -> list[str]:
    (folder / "helper.py").write_text(HELPER)
    (folder / "test_planted.py").write_text(IMPORTS + FROM_HELPER + textwrap.dedent(source))
    return [function.name for _, function in Scan(folder).without_check()]


@pytest.mark.parametrize("what", BAD)
def test_a_planted_test_is_found(tmp_path: Path, what: str) -> None:
    assert found_in(tmp_path, BAD[what]) == ["test_it"]


@pytest.mark.parametrize("what", GOOD)
def test_a_test_with_a_check_is_accepted(tmp_path: Path, what: str) -> None:
    assert found_in(tmp_path, GOOD[what]) == []


def test_it_says_where(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "store"
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text("def test_good(x): assert x.y\n\n\ndef test_bad(x): x.y()\n")
    command = [sys.executable, "-m", "tests.gate.scan", str(tmp_path / "tests")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == "tests/store/test_a.py:4 test_bad: no check that can fail\n"
    (folder / "test_a.py").write_text("def test_good(x): assert x.y\n")
    assert subprocess.run(command, cwd=ROOT).returncode == 0


def test_a_listed_test_exists(tmp_path: Path) -> None:
    listed = tmp_path / "list.txt"
    listed.write_text(
        "# rule\ntests/test_a.py::test_a[x::y]\ntests/test_a.py::TestB::test_b\ntests/test_a.py::test_c\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("def test_a(): ...\nclass TestB:\n    def test_b(self): ...\n")
    assert list(listed_but_gone(tmp_path / "tests", listed)) == ["list.txt: there is no test tests/test_a.py::test_c"]
