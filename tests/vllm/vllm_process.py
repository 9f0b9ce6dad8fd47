"""vLLM processes and the pool's node for the tests: started, spoken to by lines, ended."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waiting import wait_until

from moonpool.integrations.mooncake import shadow_path

PYTHON_VARIABLE = "MOONPOOL_VLLM_PYTHON"  # of the environment that has vLLM; set by make test-vllm
_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
QUIET = {
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
    logprobs: list[float]
    finish_reason: str
    cached: int
    external_hits: int  # of the engine since its start


def assert_same_text(answer: Answer, right: Answer) -> None:
    """KV that was loaded was computed in steps of other sizes, so sums differ in their last bits."""
    assert answer.tokens == right.tokens
    differences = [abs(one - other) for one, other in zip(answer.logprobs, right.logprobs, strict=True)]
    assert max(differences) <= 1e-4


@dataclass(frozen=True)
class StepTimes:
    """How long the engine was held up in its steps (vllm_driver.StepClock)."""

    longest_s: float
    sum_s: float
    count: int


@dataclass(frozen=True)
class Connector:
    """`config` is vLLM's kv_transfer_config; `mooncake` the file that MooncakeStoreConnector reads."""

    config: dict[str, Any]
    mooncake: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


class LineProcess:
    """A process that answers lines with lines."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self._log = log
        with open(log, "a") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
            )

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

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
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGABRT)  # it writes down where it hangs
            code = self._process.wait()
        self.close()
        assert code == 0, f"ended with {code}:\n{self._log.read_text()[-4000:]}"

    def is_running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Idempotent."""
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


class VllmProcess:
    """One engine. With `connector`, vLLM's settings for it, it finds Moonpool's modules as `mooncake`."""

    def __init__(self, folder: Path, model: Path, connector: Connector | None = None) -> None:
        folder.mkdir(parents=True)
        self._record = folder / "record.jsonl"
        self._numbers = itertools.count(1)
        self._results: dict[int, dict[str, Any]] = {}
        self._sockets = tempfile.mkdtemp(prefix="vl-")  # short: a socket's path has 107 characters
        env = {**os.environ, **QUIET, "VLLM_RPC_BASE_PATH": self._sockets}
        config = "-"
        if connector is not None:
            settings = folder / "mooncake.json"
            settings.write_text(json.dumps(connector.mooncake))
            path = [shadow_path(), str(_ROOT), str(_ROOT / "examples" / "vllm")]  # before what vLLM's environment has
            env |= {
                "PYTHONPATH": os.pathsep.join(path),
                "MOONCAKE_CONFIG_PATH": str(settings),
                "MOONPOOL_RECORD": str(self._record),
                **connector.env,
            }
            config = json.dumps(connector.config)
        command = [os.environ[PYTHON_VARIABLE], str(_HERE / "vllm_driver.py"), str(model), config]
        self.lines = LineProcess(command, folder / "log.txt", env)

    def wait_ready(self) -> None:
        self._result(0)

    def begin(self, prompt: list[int], *, num_tokens: int = 16, transfer: dict[str, Any] | None = None) -> int:
        """Return the number of the request, for result()."""
        return self._tell("generate", prompt=prompt, num_tokens=num_tokens, transfer=transfer)

    def result(self, number: int) -> Answer:
        return Answer(**self._result(number))

    def generate(self, prompt: list[int], **options: Any) -> Answer:
        return self.result(self.begin(prompt, **options))

    def forget(self) -> None:
        """Drop its own prefix cache. It refuses while a store job still reads the blocks."""
        wait_until(lambda: bool(self.ask("forget")["done"]), "the engine forgets")

    def step_times(self) -> StepTimes:
        """Of the steps since the last call."""
        return StepTimes(**self.ask("step_times"))

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        return self._result(self._tell(op, **arguments))

    def records(self, op: str) -> list[dict[str, Any]]:
        """What went through its store so far (call_recording.py)."""
        lines = self._record.read_text().splitlines() if self._record.exists() else []
        return [row for row in map(json.loads, lines) if row["op"] == op]

    def finish(self) -> None:
        self.lines.finish()

    def close(self) -> None:
        self.lines.close()
        shutil.rmtree(self._sockets)

    def _tell(self, op: str, **arguments: Any) -> int:
        number = next(self._numbers)
        self.lines.tell(json.dumps({"op": op, "number": number, **arguments}))
        return number

    def _result(self, number: int) -> dict[str, Any]:
        while number not in self._results:
            result = json.loads(self.lines.answer("RESULT "))
            self._results[result.pop("number")] = result
        return self._results.pop(number)


class NodeProcess:
    """A node of the pool whose memory the test may spoil (spoiled_node.py)."""

    def __init__(self, log: Path, **config: Any) -> None:
        self.lines = LineProcess([sys.executable, str(_HERE / "spoiled_node.py"), json.dumps(config)], log)
        self.lines.answer("mounted")

    def zero(self, offset: int, nbytes: int) -> None:
        """Overwrites its memory behind everybody's back."""
        self.lines.tell(json.dumps([offset, nbytes]))
        self.lines.answer("zeroed")

    def close(self) -> None:
        """Let it leave the pool; nothing is left to do for one that was killed."""
        if self.lines.is_running():
            self.lines.signal(signal.SIGCONT)  # a test that failed may have left it stopped
            self.lines.finish()
        self.lines.close()
