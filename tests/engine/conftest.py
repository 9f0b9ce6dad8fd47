"""A cache folder of its own for each test that prepares a model; the default model is shared by all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # tests run beside each other; two spinning pools on two cores crawl


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MOONPOOL_CACHE", str(folder))
    return folder
