"""The generated model folders of benchmarks/_random_model.py, for tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _random_model import write_model

__all__ = ["small_model", "token_prompt"]


def small_model(folder: Path) -> Path:
    """Write the small model, without weights; return its folder."""
    return write_model(folder, "small")


def token_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Return token ids that the small model has, none of them special."""
    return [(i * 7919 + seed * 104_729) % 1700 + 300 for i in range(num_tokens)]
