"""vLLM processes and the pool's node for the tests: started, spoken to by lines, ended."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PYTHON_VARIABLE = "MOONPOOL_VLLM_PYTHON"  # of the environment that has vLLM; set by make test-vllm
_HERE = Path(__file__).parent
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # two of them share two cores
}


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    cached: int
    external_hits: int


class LineProcess:
    """A process that answers lines with lines."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self._log = log
        with open(log, "a") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
            )

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self, mark: str) -> str:
        """The rest of the next line that begins with `mark`; others are passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark).strip()
        raise AssertionError(f"ended with {self._process.wait()}:\n{self._log.read_text()[-4000:]}")

    def finish(self, timeout_s: float = 60.0) -> None:
        """Ends its input and waits for it to end by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(timeout_s)
        self.close()
        assert code == 0, f"ended with {code}:\n{self._log.read_text()[-4000:]}"

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


class VllmProcess:
    """One engine. With `mooncake`, upstream's settings for the in-tree connector, it uses the pool."""

    def __init__(self, folder: Path, model: Path, mooncake: dict[str, Any] | None = None) -> None:
        folder.mkdir(parents=True)
        self._record = folder / "record.jsonl"
        self._sockets = tempfile.mkdtemp(prefix="vl-")  # short: a socket's path has 107 characters
        env = {**os.environ, **_QUIET, "VLLM_RPC_BASE_PATH": self._sockets, "MOONPOOL_RECORD": str(self._record)}
        connector = "-"
        if mooncake is not None:
            settings = folder / "mooncake.json"
            settings.write_text(json.dumps(mooncake))
            path = [str(_HERE / "recording"), env.get("PYTHONPATH", "")]
            env |= {"MOONCAKE_CONFIG_PATH": str(settings), "PYTHONPATH": os.pathsep.join(filter(None, path))}
            connector = json.dumps(
                {
                    "kv_connector": "MooncakeStoreConnector",
                    "kv_role": "kv_both",
                    "kv_load_failure_policy": "recompute",
                }
            )
        command = [os.environ[PYTHON_VARIABLE], str(_HERE / "vllm_driver.py"), str(model), connector]
        self._lines = LineProcess(command, folder / "log.txt", env)

    def wait_ready(self) -> None:
        assert json.loads(self._lines.answer("RESULT "))["ready"]

    def begin(self, prompt: list[int]) -> None:
        self._lines.tell(json.dumps(prompt))

    def result(self) -> Answer:
        return Answer(**json.loads(self._lines.answer("RESULT ")))

    def generate(self, prompt: list[int]) -> Answer:
        self.begin(prompt)
        return self.result()

    def records(self, op: str) -> list[dict[str, Any]]:
        """What went through its store so far (recording/mooncake/store.py)."""
        lines = self._record.read_text().splitlines() if self._record.exists() else []
        return [row for row in map(json.loads, lines) if row["op"] == op]

    def finish(self) -> None:
        self._lines.finish()

    def close(self) -> None:
        self._lines.close()
        shutil.rmtree(self._sockets)


class NodeProcess:
    """A node of the pool whose memory the test may spoil (spoiled_node.py)."""

    def __init__(self, log: Path, **config: Any) -> None:
        self._lines = LineProcess([sys.executable, str(_HERE / "spoiled_node.py"), json.dumps(config)], log)
        self._lines.answer("mounted")

    def zero(self, offset: int, nbytes: int) -> None:
        """Overwrites its memory behind everybody's back."""
        self._lines.tell(json.dumps([offset, nbytes]))
        self._lines.answer("zeroed")

    def close(self) -> None:
        self._lines.finish()
