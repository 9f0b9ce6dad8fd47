"""For all tests: hypothesis' profiles, what a test mounts ends with the test process, and which tests share a process.

A property holds however busy the machine is, so no example of it has a deadline. Profile `ci` tries the same examples
each time; HYPOTHESIS_PROFILE=soak tries new and more ones.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from small_disk import own_mounts

_SLOW = [HealthCheck.too_slow]
settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, suppress_health_check=_SLOW)
settings.register_profile("soak", deadline=None, max_examples=1000, suppress_health_check=_SLOW)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

_SHARED_SERVICES = ("two_of_all", "two_each", "one_each", "smollm2")  # tests/e2e/conftest.py
_LONG = ("e2e", "faults", "bench")  # folders whose files take longest
_SPREAD = ("test_simulation.py",)  # long files of tests that share nothing


def pytest_configure() -> None:
    own_mounts()


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share a service run in one process, as do those of one file; those that take long come first."""
    for item in items:
        if group := _group_of(item):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=_turn)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Where pytest-xdist groups tests, it adds the group to the name. Otherwise services would start many times."""
    if getattr(session.config.option, "loadgroup", False):
        ungrouped = [item.nodeid for item in session.items if _group_of(item) and "@" not in item.nodeid]
        if ungrouped:
            raise pytest.UsageError(f"pytest-xdist does not group {len(ungrouped)} tests, first {ungrouped[0]}")


def _group_of(item: pytest.Item) -> str:
    """Return the name of the tests that run in one process with this one; "" for none."""
    shared = _shared_by(item)
    return shared or (item.path.name if item.path.name not in _SPREAD else "")


def _shared_by(item: pytest.Item) -> str:
    names = getattr(item, "fixturenames", ())
    return next((shared for shared in _SHARED_SERVICES if shared in names), "")


def _turn(item: pytest.Item) -> tuple[bool, int, bool]:
    """Tests of one group stay together."""
    shared = _shared_by(item)
    return (not shared, _SHARED_SERVICES.index(shared) if shared else -1, item.path.parent.name not in _LONG)
