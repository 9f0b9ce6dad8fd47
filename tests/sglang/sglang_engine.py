"""An SGLang engine as a process, its hierarchical cache on the pool through SGLang's own `mooncake` backend."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_pool import HELPERS, NUM_PROMPT_TOKENS, EngineAnswer, EngineDriver
from sglang_driver import PAGE_TOKENS
from waiting import wait_until

PYTHON_VARIABLE = "MOONPOOL_SGLANG_PYTHON"  # of the environment that has SGLang; set by make test-sglang
OBJECTS = NUM_PROMPT_TOKENS // PAGE_TOKENS * 2  # of each prompt: K and V of each page
_HERE = Path(__file__).parent
STAND_INS = str(_HERE / "stand_ins")  # goes on PYTHONPATH
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_HICACHE_MOONCAKE_REUSE_TE": "0",  # the store has its own transfer engine
}


@dataclass(frozen=True)
class Stored:
    """What the first engine computed, without any help, and stored: its answers by seed, hashes by key."""

    answers: dict[int, EngineAnswer]
    keys: dict[int, list[str]]  # by seed, in the order of the prompt, K before V
    hashes: dict[str, str]


class SglangEngine:
    """It has nothing in memory at the start: what is not computed comes from the pool."""

    def __init__(self, folder: Path, model: Path, master: str, **env: str) -> None:
        folder.mkdir(parents=True)
        self._record_file = folder / "record.jsonl"
        path = [STAND_INS, str(_HERE / "recording"), HELPERS, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            **QUIET,
            **env,
            "MOONPOOL_RECORD": str(self._record_file),
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        }
        extra = {
            "master_server_address": master,
            "local_hostname": "127.0.0.1",
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "tcp",
            "global_segment_size": 0,  # the engine offers no memory of its own
        }
        command = [os.environ[PYTHON_VARIABLE], str(_HERE / "sglang_driver.py"), str(model), json.dumps(extra)]
        self._driver = EngineDriver(command, folder / "sglang.log", environment)

    def wait_ready(self) -> None:
        self._driver.wait_ready()

    def generate(self, prompt: list[int]) -> EngineAnswer:
        return self._driver.generate(prompt)

    def records(self, op: str, since: int = 0) -> list[dict[str, Any]]:
        """Return what the engine asked of the store and got, from the `since`th of these calls on."""
        lines = self._record_file.read_text().splitlines() if self._record_file.exists() else []
        return [row for row in map(json.loads, lines) if row["op"] == op][since:]

    def stored(self) -> dict[str, str]:
        """Return the hash of each object that was stored, by its key."""
        return object_hashes(self.records("put"), lambda code: code == 0)

    def wait_stored(self, num_objects: int) -> None:
        wait_until(lambda: len(self.stored()) >= num_objects, f"{num_objects} objects are stored")

    def counters(self) -> dict[str, int]:
        """Return the store's counters after the last call."""
        lines = self._record_file.read_text().splitlines()
        counters: dict[str, int] = json.loads(lines[-1])["counters"]
        return counters

    def finish(self) -> None:
        """Let it end by itself."""
        self._driver.finish()

    def close(self) -> None:
        """Idempotent."""
        self._driver.close()


def object_hashes(rows: list[dict[str, Any]], is_good: Any) -> dict[str, str]:
    """Return the hash of each object whose result is good, by its key."""
    return {
        key: sha256
        for row in rows
        for key, sha256, code in zip(row["keys"], row["sha256"], row["codes"], strict=True)
        if is_good(code)
    }
