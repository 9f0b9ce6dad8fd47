"""Services that several tests share; each file says which shape it needs. A service stops after the last test that
uses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e_service import Service, running
from forked_cli import Command, forked_cli
from otlp_receiver import Collector, running_collector
from random_model import small_model

# Every block that the pool has is taken from it, whatever was measured, so that what is reused can be told exactly.
TAKE_ALL = ("--policy", "paper")
_running: dict[str, Service] = {}


def _shared(name: str, factory: pytest.TempPathFactory, *options: str) -> Iterator[Service]:
    with running(factory.mktemp(name), *options) as service:
        _running[name] = service
        yield service


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    still_needed = getattr(nextitem, "fixturenames", ())
    for name in _running.keys() - set(still_needed):
        _running.pop(name).stop()


@pytest.fixture(scope="module")
def moonpool() -> Iterator[Command]:
    """Runs commands that ask a running service for a change."""
    with forked_cli("role", "scale", "drain") as command:
        yield command


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Takes the traces of `one_each`."""
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="session")
def one_each(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Service]:
    """One prefill, one decode worker, with the small model, and a node with an SSD tier; each request is traced."""
    model = small_model(tmp_path_factory.mktemp("model") / "small")
    ssd = ("--ssd", str(tmp_path_factory.mktemp("disk") / "ssd"), "--ssd-size", "1GB")
    options = ("--model", str(model), "--random-weights", "--otlp", collector.url)
    yield from _shared("one_each", tmp_path_factory, *options, *ssd, *TAKE_ALL)


@pytest.fixture(scope="session")
def two_each(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two prefill, two decode workers with the small model, and the tour of the live page."""
    model = small_model(tmp_path_factory.mktemp("model") / "small")
    options = (
        "--model",
        str(model),
        "--random-weights",
        "--prefill",
        "2",
        "--decode",
        "2",
        "--tour",
        "--dram",
        "256MB",
    )
    yield from _shared("two_each", tmp_path_factory, *options, *TAKE_ALL)


@pytest.fixture(scope="session")
def two_of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two of everything but the master, with the small model. The pages of each worker hold 45 blocks."""
    model = small_model(tmp_path_factory.mktemp("model") / "small")
    roles = ("prefill", "decode", "nodes", "conductors", "frontends")
    numbers = [word for role in roles for word in (f"--{role}", "2")]
    ssd = ("--ssd", str(tmp_path_factory.mktemp("disk") / "ssd"))
    options = ("--model", str(model), "--random-weights", *numbers, "--kv", "12MB", "--dram", "64MB", *ssd)
    yield from _shared("two_of_all", tmp_path_factory, *options)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One prefill, one decode worker, with the default model."""
    yield from _shared("smollm2", tmp_path_factory, "--kv", "512MB", "--dram", "512MB", *TAKE_ALL)
