"""The example of docs/lmcache.md measures a hit."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from lmcache_engine import PYTHON_VARIABLE, QUIET

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(600)]
_ROOT = Path(__file__).parents[2]
_OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 64 * 1024 * 1024,
}


def test_the_example_loads_what_it_stored(model: Path) -> None:
    script = _ROOT / "examples" / "lmcache" / "two_engines.py"
    done = subprocess.run(
        [os.environ[PYTHON_VARIABLE], str(script), str(model), json.dumps(_OPTIONS)],
        env={**os.environ, **QUIET, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    loaded = dict(re.findall(r"(\w+) engine: (\d+) of 900 tokens loaded", done.stdout))
    assert int(loaded["first"]) == 0
    assert int(loaded["second"]) >= 810
    assert "the answers are equal" in done.stdout
