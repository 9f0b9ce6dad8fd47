"""The examples of docs/vllm.md, with vLLM servers: each one measures a hit."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from vllm_pool import FEWEST_LOADED
from vllm_process import PYTHON_VARIABLE, QUIET

pytestmark = pytest.mark.vllm
_ROOT = Path(__file__).parents[2]
_OPTIONS = "--dtype float32 --enforce-eager --max-model-len 4096 --max-num-seqs 4 --kv-cache-memory-bytes 67108864"


@pytest.mark.parametrize(("script", "server"), [("shared_store", "second"), ("prefill_decode", "decode")])
def test_example(script: str, server: str, model: Path) -> None:
    env = os.environ | QUIET | {"PYTHONPATH": str(_ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(
        [os.environ[PYTHON_VARIABLE], str(_ROOT / "examples" / "vllm" / f"{script}.py"), str(model), *_OPTIONS.split()],
        env=env, capture_output=True, text=True, timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
    found = re.search(rf"{server} server: loaded (\d+) of", done.stdout)
    assert found is not None
    assert int(found[1]) >= FEWEST_LOADED
    assert "the answers are equal" in done.stdout
