"""The machines of benchmarks/_machines_lab.py, for tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _machines_lab import LauncherProcess, Machine, MachinesLab, RoleProcess, missing

__all__ = ["LauncherProcess", "Machine", "MachinesLab", "RoleProcess", "missing"]
