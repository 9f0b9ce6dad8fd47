"""The example of docs/sglang.md measures a hit."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from sglang_driver import CPU_OPTIONS
from sglang_engine import PYTHON_VARIABLE, QUIET, STAND_INS

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
_ROOT = Path(__file__).parents[2]


def test_the_example_loads_what_it_stored(model: Path) -> None:
    script = _ROOT / "examples" / "sglang" / "two_engines.py"
    done = subprocess.run(
        [os.environ[PYTHON_VARIABLE], str(script), str(model), json.dumps(CPU_OPTIONS)],
        env={**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join([STAND_INS, str(_ROOT)])},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    loaded = dict(re.findall(r"(\w+) engine: (\d+) of 900 tokens loaded", done.stdout))
    assert int(loaded["first"]) == 0
    assert int(loaded["second"]) >= 810
    assert "the answers are equal" in done.stdout
