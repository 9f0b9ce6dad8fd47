"""The Prometheus of benchmarks/_prometheus.py, for tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _prometheus import JOB, Prometheus, running_prometheus

__all__ = ["JOB", "Prometheus", "running_prometheus"]
