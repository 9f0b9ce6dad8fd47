"""examples/01_pool_by_hand.py runs and shows what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_pool_by_hand() -> None:
    script = Path(__file__).parents[2] / "examples" / "01_pool_by_hand.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "bytes equal:    True" in done.stdout
    assert "was evicted" in done.stdout
