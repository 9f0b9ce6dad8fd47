"""The example of docs/sglang.md measures a hit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from engine_pool import check_example, run_example
from sglang_driver import CPU_OPTIONS
from sglang_engine import PYTHON_VARIABLE, QUIET, STAND_INS

pytestmark = pytest.mark.sglang
_ROOT = Path(__file__).parents[2]


def test_the_example_loads_what_it_stored(model: Path) -> None:
    script = _ROOT / "examples" / "sglang" / "two_engines.py"
    env = {**QUIET, "PYTHONPATH": os.pathsep.join([STAND_INS, str(_ROOT)])}
    check_example(run_example(script, [str(model), json.dumps(CPU_OPTIONS)], os.environ[PYTHON_VARIABLE], env))
