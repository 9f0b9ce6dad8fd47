"""The example of docs/lmcache.md measures a hit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from engine_pool import check_example, run_example
from lmcache_engine import PYTHON_VARIABLE, QUIET

pytestmark = pytest.mark.lmcache
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
    env = {**QUIET, "PYTHONPATH": str(_ROOT)}
    check_example(run_example(script, [str(model), json.dumps(_OPTIONS)], os.environ[PYTHON_VARIABLE], env))
