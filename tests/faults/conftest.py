"""One tiny model on disk for all fault tests, and an undisturbed engine that says which tokens are right."""

from __future__ import annotations

import pytest
import torch
from tiny_cluster import Oracle
from tiny_models import save_tiny

torch.set_num_threads(1)  # many engines in one process on two cores


@pytest.fixture(scope="session")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where prepared files of the tiny model go."""
    return str(tmp_path_factory.mktemp("tiny-cache"))


@pytest.fixture(autouse=True)
def _uses_tiny_cache(tiny_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_CACHE", tiny_cache)  # not for the session: tests of other folders need the real one


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny("llama", folder / "model")
    return str(folder / "model")


@pytest.fixture(scope="session")
def oracle(tiny_model: str, tiny_cache: str) -> Oracle:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOONPOOL_CACHE", tiny_cache)
        return Oracle(tiny_model)
