"""Planted faults: each still fits the code and names tests that exist; in soak, these tests find it."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import cache

import pytest

from .planted import PACKAGE, ROOT, MisfitError, edited, look, look_at_nothing, pytest_sessionstart
from .planted_faults import FAULTS, Fault

ALL = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


@ALL
def test_it_fits_the_code(fault: Fault) -> None:
    for file, text in edited(fault).items():
        path = PACKAGE / file
        before = path.read_text() if path.exists() else ""
        assert ast.dump(ast.parse(text, file)) != ast.dump(ast.parse(before)), "it changes no code"


@ALL
def test_its_tests_exist(fault: Fault) -> None:
    assert fault.tests
    for test in fault.tests:
        file, name = test.split("::")
        assert name in names_in(file), f"{fault.name} names {test}"


@pytest.mark.parametrize(("old", "count"), [("this is nowhere", "0"), ("import", r"[1-9]\d+")])
def test_a_fault_that_does_not_fit_is_refused(old: str, count: str) -> None:
    edit = ("frontend/answer.py", old, "")
    with pytest.raises(MisfitError, match=rf"x no longer fits the code: frontend/answer\.py has {count} times"):
        edited(replace(FAULTS["stream-without-done"], name="x", edits=(edit,)))


def test_tests_of_the_code_itself_find_nothing(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As if PYTHONPATH had been lost on the way."""
    monkeypatch.setenv("MOONPOOL_PLANTED_COPY", "/nowhere/moonpool")
    with pytest.raises(pytest.exit.Exception, match=r"and not /nowhere/moonpool/__init__\.py"):
        pytest_sessionstart(request.session)


def test_a_planted_fault_is_found() -> None:
    """One that takes little time; the others are for soak. Each named test has to notice it."""
    file = "tests/master/test_unsynced_keys.py"
    finds, is_blind = (f"{file}::{name}" for name in ("test_a_batch_of_new_objects", "test_a_slow_disk_is_not_hurried"))
    found = look(replace(FAULTS["e1ea4be"], tests=(finds, is_blind)))
    assert list(found.run.failures) == [finds], found.output
    assert found.problem == f"not noticed by {is_blind}"


@pytest.mark.soak
@ALL
def test_it_is_found(fault: Fault) -> None:
    found = look(fault)
    assert found.problem is None, found.output


@pytest.mark.soak
def test_without_a_fault_all_named_tests_pass() -> None:
    found = look_at_nothing(sorted({test for fault in FAULTS.values() for test in fault.tests}))
    assert not found.run.broken, found.output
    assert not found.run.failures, found.output
    assert found.run.count("passed")
