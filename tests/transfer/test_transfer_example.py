"""examples/transfer_two_processes.py runs and shows what it says."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from engine_child import running_master
from waiting import HANG_S


@pytest.mark.parametrize("by_master", [False, True])
def test_transfer_two_processes(tmp_path: Path, by_master: bool) -> None:
    script = Path(__file__).parents[2] / "examples" / "transfer_two_processes.py"
    with ExitStack() as stack:
        command = [sys.executable, str(script)]
        if by_master:
            command.append(stack.enter_context(running_master(tmp_path)))
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "notes are reached by shm, pages by tcp" in done.stdout
    assert "b'hello'" in done.stdout
    assert "read back:      30 0" in done.stdout
    assert "told about pages [3, 5] and found [30, 50] in them" in done.stdout
