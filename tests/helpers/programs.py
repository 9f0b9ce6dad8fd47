"""Programs that are not Python packages and that some tests need."""

from __future__ import annotations

import os
import shutil

import pytest


def find_program(*names: str, needed_by: str) -> str:
    """Return the path of the first program that is installed. Without one the test is skipped with a line that says so;
    in CI (the variable CI is set) it fails."""
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    message = f"{names[0]} is not installed: {needed_by} did not run (apt-get install {names[0]})"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
