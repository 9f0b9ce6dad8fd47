"""One tiny model on disk for all fault tests, and an undisturbed engine that says which tokens are right."""

from __future__ import annotations

import pytest
import torch
from tiny_cluster import Oracle
from tiny_llama import SMALLEST, save_tiny_llama
from waiting import HANG_S

from moonpool.worker import reporter, service

torch.set_num_threads(1)  # many engines in one process on two cores


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where prepared files of the tiny model go."""
    return str(tmp_path_factory.mktemp("tiny-cache"))


@pytest.fixture(autouse=True)
def _uses_tiny_cache(tiny_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_CACHE", tiny_cache)  # not for the session: tests of other folders need the real one


@pytest.fixture(autouse=True)
def _quick_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conductors and idle workers hear of each other's changes soon, and a worker that leaves waits for its conductors,
    however long that takes, but no second longer."""
    monkeypatch.setattr(reporter, "_HEARTBEAT_S", 0.05)
    monkeypatch.setattr(reporter, "_RECONNECT_S", 0.02)
    monkeypatch.setattr(service, "leave_all", lambda reporters, _: reporter.leave_all(reporters, HANG_S))
    monkeypatch.setattr(service, "_ON_THEIR_WAY_S", 0.1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder / "model", SMALLEST)
    return str(folder / "model")


@pytest.fixture(scope="session")
def oracle(tiny_model: str, tiny_cache: str) -> Oracle:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOONPOOL_CACHE", tiny_cache)
        return Oracle(tiny_model)
