"""One tiny model on disk for all fault tests, and an undisturbed engine that says which tokens are right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiny_cluster import Oracle
from tiny_models import save_tiny

torch.set_num_threads(1)  # many engines in one process on two cores


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOONPOOL_CACHE", str(folder / "cache"))
        save_tiny("llama", folder / "model")
        yield str(folder / "model")


@pytest.fixture(scope="session")
def oracle(tiny_model: str) -> Oracle:
    return Oracle(tiny_model)
