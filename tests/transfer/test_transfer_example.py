"""examples/transfer_two_processes.py runs and shows what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_transfer_two_processes() -> None:
    script = Path(__file__).parents[2] / "examples" / "transfer_two_processes.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "notes are reached by shm, pages by tcp" in done.stdout
    assert "b'hello'" in done.stdout
    assert "read back:      30 0" in done.stdout
    assert "told about pages [3, 5] and found [30, 50] in them" in done.stdout
