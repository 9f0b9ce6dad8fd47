"""examples/03_store_alone.py runs and shows what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_store_alone() -> None:
    script = Path(__file__).parents[2] / "examples" / "03_store_alone.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "get poem:       b'The moon is a pool.'" in done.stdout
    assert "a copy? False" in done.stdout
    assert "float32 (1000, 1000) equal: True" in done.stdout
    assert "layer 2 equal:  True" in done.stdout
    assert "then removed:   (b'poem',)" in done.stdout
    assert "was removed" in done.stdout
