"""Where the opt-in module named `mooncake` lies."""

from __future__ import annotations

from pathlib import Path


def shadow_path() -> str:
    """A folder for PYTHONPATH: with it, `import mooncake.store` finds Moonpool. It hides an installed Mooncake."""
    return str(Path(__file__).resolve().parent / "shadow")
