"""Real engines of other projects on a pool of real processes: what the tests of LMCache and SGLang share."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked_script import ForkedProcess
from store_pool import MIB, RoleProcess
from waiting import wait_until

from moonpool.store import Store
from moonpool.store.client import ClientConfig

_TESTS = Path(__file__).parents[1]
HELPERS = str(Path(__file__).parent)  # for the PYTHONPATH of engines whose calls are recorded
NUM_PROMPT_TOKENS = 900
NODE_NBYTES = 256 * MIB


def prompt_of(seed: int, vocab: int = 512) -> list[int]:
    """Return a prompt of which no two blocks are alike, nor any block of two seeds."""
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(NUM_PROMPT_TOKENS)]


class LinedProcess:
    """A process in a group of its own that answers lines with lines. close() ends the group, its children included."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self._log = log
        with open(log, "a") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
                start_new_session=True,
            )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self, mark: str) -> str:
        """Return the rest of the next line that begins with `mark`. Other lines are skipped."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark).strip()
        raise AssertionError(f"{mark} never came; the log ends with:\n{self._log.read_text()[-6000:]}")

    def finish(self, timeout_s: float = 90.0) -> None:
        """End its input and wait until it has ended by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout_s)
        finally:
            self.close()

    def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def run_example(script: Path, arguments: list[str], python: str, env: dict[str, str]) -> str:
    """Return what the example printed. Whatever it started has ended when this returns."""
    process = subprocess.Popen(
        [python, str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=540)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, errors[-4000:]
    return printed


def check_example(printed: str) -> None:
    """The second engine loaded at least 90 % of the prompt, the first nothing, and they agree."""
    loaded = dict(re.findall(rf"(\w+) engine: (\d+) of {NUM_PROMPT_TOKENS} tokens loaded", printed))
    assert int(loaded["first"]) == 0
    assert int(loaded["second"]) >= NUM_PROMPT_TOKENS * 9 // 10
    assert "the answers are equal" in printed


@dataclass(frozen=True)
class EngineAnswer:
    tokens: list[int]
    cached: int  # prompt tokens that were not computed, by the engine's own count
    elapsed_s: float = 0.0


class EngineDriver(LinedProcess):
    """One engine. Its driver script says `READY`, and answers a prompt with `RESULT {"tokens": ..., "cached": ...}`."""

    def wait_ready(self) -> None:
        self.answer("READY")

    def generate(self, prompt: list[int]) -> EngineAnswer:
        begun_s = time.monotonic()
        self.tell(json.dumps(prompt))
        result = json.loads(self.answer("RESULT"))
        return EngineAnswer(**result, elapsed_s=time.monotonic() - begun_s)


def stop(process: subprocess.Popen[str] | ForkedProcess) -> None:
    """SIGSTOP, and wait until no thread of it runs: the signal itself is only a request."""
    process.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{process.pid}/task")
    wait_until(
        lambda: {stat.read_text().rpartition(")")[2].split()[0] for stat in threads.glob("*/stat")} == {"T"},
        "it is stopped",
    )


def resume_after(role: LinedProcess | RoleProcess, stopped_s: float) -> Callable[[], None]:
    """Return a call that lets a process go on that was stopped now, when it has been stopped for so long."""
    end_s = time.monotonic() + stopped_s

    def resume() -> None:
        time.sleep(max(0.0, end_s - time.monotonic()))  # the outage's length, not a wait for something
        role.process.send_signal(signal.SIGCONT)

    return resume


@dataclass(frozen=True)
class SavedObjects:
    values: dict[bytes, bytes]
    segments: set[tuple[str, int]]  # where they were


class EnginePool:
    """A master and a node as processes that a test may stop, kill and start again, and a Store to look inside."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.address = f"unix:{folder}/m.sock"
        self._stack = ExitStack()
        self._num_nodes = 0
        self.master = self._start_master()
        self.node = self._start_node()
        self._stack.callback(lambda: self.node.close())
        self._stack.callback(lambda: self._close_master())
        patient = ClientConfig(name="test", retry_s=10.0)
        self.store = self._stack.enter_context(Store(self.address, config=patient))

    def close(self) -> None:
        for process in (self.master.process, self.node.process):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)  # a test that failed may have left it stopped
        self._stack.close()

    def kill_master(self) -> None:
        self.master.kill()

    def kill_node(self) -> None:
        self.node.process.kill()
        self.node.process.wait()

    def restart_master(self) -> None:
        self.master = self._start_master()

    def restart_node(self) -> None:
        self.node.close()
        self.node = self._start_node()

    def zero(self, key: bytes) -> None:
        """Overwrite the last bytes of the stored object in the node's memory, behind everybody's back."""
        (info,) = self.store.lookup([key])
        assert info is not None
        nbytes = min(1000, info.nbytes // 2)
        self.node.tell(json.dumps([info.replicas[0].offset + info.nbytes - nbytes, nbytes]))
        self.node.answer("zeroed")

    def saved(self) -> SavedObjects:
        """Return all that is stored, for a test that loses it on purpose."""
        found = {key: self.store.get(key) for key in list(self.store.keys())}
        values = {key: value for key, value in found.items() if value is not None}
        return SavedObjects(values, self._segments(values))

    def put_back(self, saved: SavedObjects) -> None:
        """Store again what was lost, so that other tests do not depend on the one that lost it."""
        wait_until(lambda: not saved.segments & self._segments(saved.values), "the master has given them up")

        def is_stored() -> bool:
            self.store.put_many(saved.values)
            return all(self.store.exist_many(saved.values))

        wait_until(is_stored, "it is stored")

    def _segments(self, keys: Iterable[bytes]) -> set[tuple[str, int]]:
        """Return the segments that have these objects, each with its incarnation."""
        infos = [info for info in self.store.lookup(list(keys)) if info is not None]
        return {(place.segment, place.incarnation) for info in infos for place in info.replicas}

    def _start_master(self) -> RoleProcess:
        return RoleProcess("master", data_dir=str(self._folder / "master"), listen=self.address)

    def _close_master(self) -> None:
        self.master.close()

    def _start_node(self) -> LinedProcess:
        self._num_nodes += 1
        config: dict[str, Any] = {
            "name": f"n{self._num_nodes}",
            "master_address": self.address,
            "dram_nbytes": NODE_NBYTES,
            "run_dir": str(self._folder / f"run{self._num_nodes}"),
        }
        script = _TESTS / "vllm" / "spoiled_node.py"
        node = LinedProcess([sys.executable, str(script), json.dumps(config)], self._folder / "node.log")
        node.answer("mounted")
        return node
