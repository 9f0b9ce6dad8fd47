"""A plugin of pytest (`-p tests.gate.outcomes`): it writes what became of each test, one JSON line per event.

Under pytest-xdist the workers know the exceptions and the controller writes the file: the worker puts what the gate
needs to know on the report, whose attributes travel. `--gate-only` runs the tests that a file names, and no others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

_NAME = pytest.StashKey[str]()
_PLUGIN = "gate-writer"
_IN_TRACEBACK = re.compile(r"\bsevere\.([A-Z]\w+): ")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gate", "the gate of the tests (docs/testing.md)")
    group.addoption("--gate-outcomes", metavar="FILE", help="write what became of each test to this file")
    group.addoption("--gate-only", metavar="FILE", help="run the tests whose names are in this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return
    if config.option.gate_outcomes:
        config.pluginmanager.register(Writer(Path(config.option.gate_outcomes)), _PLUGIN)
    if config.option.gate_only:
        names = json.loads(Path(config.option.gate_only).read_text())
        config.args = [f"{config.rootpath}/{name}" for name in names]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # pytest-xdist adds a test's group to its name
        item.stash[_NAME] = item.nodeid


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report: Any = yield
    report.gate_name = item.stash.get(_NAME, item.nodeid)
    if report.failed and call.excinfo is not None:
        report.gate_line = first_line(call.excinfo.exconly())
        chain = list(chain_of(call.excinfo.value))
        report.gate_types = [type(each).__name__ for each in chain]
        report.gate_severe = next((type(each).__name__ for each in chain if is_severe(each)), None)
    return cast(pytest.TestReport, report)


class Writer:
    """Only in the process that has the whole run in view."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = report.longreprtext if report.failed else ""
        self._write(
            "phase",
            name=getattr(report, "gate_name", report.nodeid),
            when=report.when,
            outcome=report.outcome,
            seconds=report.duration,
            line=getattr(report, "gate_line", first_line(text)),
            types=getattr(report, "gate_types", []),
            severe=getattr(report, "gate_severe", None) or severe_in_text(report),
            text=text,
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            lines = report.longreprtext.strip().splitlines() or [""]
            self._write(
                "collect", name=report.nodeid, line=lines[-1].removeprefix("E").strip(), text=report.longreprtext
            )

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        if error:
            self._write("crash", name=node.gateway.id, line=first_line(str(error)))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._write("end", stopped=str(session.shouldfail or session.shouldstop or ""))

    def _write(self, kind: str, **what: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **what}) + "\n")
        self._file.flush()  # what is written stays when this process dies


def first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def severe_in_text(report: pytest.TestReport) -> str | None:
    """The class that a process of the test died of: its traceback is in what the test says, or in the output."""
    if not report.failed:
        return None
    texts = [report.longreprtext, *(text for _, text in report.sections)]
    found = _IN_TRACEBACK.search("\n".join(texts))
    return found[1] if found else None


def is_severe(error: BaseException) -> bool:
    """By name: this module is loaded before tests/helpers is on sys.path."""
    return any(kind.__name__ == "SevereError" for kind in type(error).__mro__)


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The exception, those that it came from, and those in its groups, each once."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += [each.__cause__, each.__context__]
        left += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
