"""The garbage collector of a role: cycles that were long in use, as those of connections are, do not pile up."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from collections import deque
from moonpool.base.process import _calm_collector

num_freed = 0

class Connection:
    def __init__(self):
        self.transport = [self]

    def __del__(self):
        global num_freed
        num_freed += 1

_calm_collector()
in_use, most_left = deque(maxlen=120_000), 0
for number in range(600_000):
    in_use.append(Connection())
    most_left = max(most_left, number - num_freed)
print(most_left)
"""


def test_cycles_that_were_long_in_use_are_freed() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 400_000
