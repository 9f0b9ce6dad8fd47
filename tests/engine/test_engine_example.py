"""examples/02_engine_by_hand.py runs and shows what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.model


def test_engine_by_hand() -> None:
    script = Path(__file__).parents[2] / "examples" / "02_engine_by_hand.py"
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # beside other tests more threads only wait for each other
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=one_thread)
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout
    assert "192 of them reused" in done.stdout
