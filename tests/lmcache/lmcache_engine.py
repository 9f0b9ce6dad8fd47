"""An LMCache server and a vLLM engine on it, as processes, with Moonpool's plug-in as LMCache's second tier."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_pool import HELPERS, NUM_PROMPT_TOKENS, EngineAnswer, EngineDriver, LinedProcess
from waiting import wait_until

PYTHON_VARIABLE = "MOONPOOL_LMCACHE_PYTHON"  # of the environment that has LMCache and vLLM; set by make test-lmcache
CHUNK_TOKENS = 128
CHUNKS = NUM_PROMPT_TOKENS // CHUNK_TOKENS  # of each prompt
_HERE = Path(__file__).parent
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Stored:
    """What the first engine computed, without any help, and stored: its answers by seed, its chunks' hashes by key."""

    answers: dict[int, EngineAnswer]
    keys: dict[int, list[str]]  # LMCache's keys by seed, in the order of the prompt
    hashes: dict[str, str]


class LmcacheEngine:
    """Both have nothing in memory at the start: what is not computed comes from the pool."""

    def __init__(self, folder: Path, model: Path, **settings: Any) -> None:
        folder.mkdir(parents=True)
        self.counters_file, self._record_file = folder / "counters.json", folder / "record.jsonl"
        self._sockets = tempfile.mkdtemp(prefix="lm-")  # short: a socket's path has 107 characters
        python, path = (
            os.environ[PYTHON_VARIABLE],
            os.pathsep.join([str(_HERE), HELPERS, os.environ.get("PYTHONPATH", "")]),
        )
        env = {**os.environ, **QUIET, "VLLM_RPC_BASE_PATH": self._sockets, "PYTHONPATH": path.rstrip(os.pathsep)}
        port = _free_port()
        plugin = {
            "type": "native_plugin",
            "module_path": "recorded_connector",
            "class_name": "RecordedConnector",
            "adapter_params": {
                "record_file": str(self._record_file),
                "counters_file": str(self.counters_file),
                **settings,
            },
        }
        server = [python, "-m", "lmcache.v1.multiprocess.server", "--host", "localhost", "--port", str(port)]
        server += ["--l1-size-gb", "0.25", "--no-l1-use-lazy", "--eviction-policy", "LRU", "--chunk-size"]
        server += [str(CHUNK_TOKENS), "--supported-transfer-mode", "engine_driven", "--disable-observability"]
        self._server = LinedProcess([*server, "--l2-adapter", json.dumps(plugin)], folder / "lmcache.log", env)
        self._driver = EngineDriver(
            [python, str(_HERE / "lmcache_driver.py"), str(model), str(port)], folder / "vllm.log", env
        )

    def wait_ready(self) -> None:
        self._driver.wait_ready()

    def generate(self, prompt: list[int]) -> EngineAnswer:
        return self._driver.generate(prompt)

    def records(self, op: str, since: int = 0) -> list[dict[str, Any]]:
        """Return what LMCache asked of the plug-in and got, from the `since`th of these on."""
        lines = self._record_file.read_text().splitlines() if self._record_file.exists() else []
        return [row for row in map(json.loads, lines) if row["op"] == op][since:]

    def stored(self) -> dict[str, str]:
        """Return the hash of each chunk that was stored, by LMCache's key."""
        return chunk_hashes(self.records("store"))

    def wait_stored(self, num_chunks: int) -> None:
        wait_until(lambda: len(self.stored()) >= num_chunks, f"{num_chunks} chunks are stored")

    def counters(self) -> dict[str, int]:
        counters: dict[str, int] = json.loads(self.counters_file.read_text()) if self.counters_file.exists() else {}
        return counters

    def close(self) -> None:
        """Idempotent."""
        self._driver.close()
        self._server.close()
        shutil.rmtree(self._sockets, ignore_errors=True)

    def finish(self) -> None:
        """Let the engine end by itself."""
        self._driver.finish()
        self.close()


def chunk_hashes(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the hash of each chunk that was stored or loaded, by LMCache's key."""
    return {
        key: sha256
        for row in rows
        for key, sha256, is_done in zip(row["keys"], row["sha256"], row["done"], strict=True)
        if is_done
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
