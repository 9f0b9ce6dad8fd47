"""One vLLM engine in one process, driven by lines: a command in as JSON, `RESULT {json}` out. It ends with its input.

Run with the Python of vLLM's own environment: `vllm_driver.py MODEL_FOLDER CONNECTOR_JSON|-`. Every result has the
number of its command. The engine is stepped here, so that other commands are answered while prompts are computed, and
so that the steps can be measured.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import json
import queue
import sys
import threading
import time
from typing import Any

import call_recording
from vllm import LLM, SamplingParams

_IDLE_S = 0.005  # between the steps of an engine that has nothing to compute
_SHORTEST_WAIT_S = 0.01  # below, threads of this process took turns


class StepClock:
    """How long the engine's thread was held up in its steps: the time in which it neither ran nor waited for a core."""

    def __init__(self) -> None:
        self.longest_s = self.sum_s = 0.0
        self.count = 0

    def measure(self, engine: Any) -> list[Any]:
        """Return what engine.step() returns."""
        began, busy = time.perf_counter(), _busy_s()
        outputs: list[Any] = engine.step()
        held_up_s = max(0.0, time.perf_counter() - began - (_busy_s() - busy))
        self.longest_s = max(self.longest_s, held_up_s)
        self.sum_s += held_up_s if held_up_s >= _SHORTEST_WAIT_S else 0.0
        self.count += 1
        return outputs


class Driver:
    """The commands. Each one is a dictionary: `op` names the method, the rest are its arguments."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self._commands: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._times = StepClock()
        threading.Thread(target=self._read_commands, daemon=True).start()

    def run(self) -> None:
        while True:
            try:
                command = self._commands.get(timeout=_IDLE_S)
                if command is None:
                    return
                getattr(self, command.pop("op"))(**command)
            except queue.Empty:
                pass
            # Also without a request: connectors are told by the next step that a request has finished.
            while self._step() and self._commands.empty():
                pass

    def generate(self, number: int, prompt: list[int], num_tokens: int, transfer: dict[str, Any] | None) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=0,
            extra_args=None if transfer is None else {"kv_transfer_params": transfer},
        )  # fmt: skip
        self._engine.add_request(str(number), {"prompt_token_ids": prompt}, params)

    def forget(self, number: int) -> None:
        """Drop the engine's own prefix cache, so that the next prompt can only come from the pool."""
        _say(number, done=self._llm.reset_prefix_cache())

    def external_hits(self, number: int) -> None:
        _say(number, count=_external_hits(self._llm))

    def hold_loads(self, number: int) -> None:
        call_recording.gate.clear()
        _say(number)

    def loads_held(self, number: int) -> None:
        _say(number, count=call_recording.num_waiting)

    def release_loads(self, number: int) -> None:
        call_recording.gate.set()
        _say(number)

    def step_times(self, number: int) -> None:
        """Of the steps since the last such command."""
        times, self._times = self._times, StepClock()
        _say(number, **vars(times))

    def hashes(self, number: int, spans: list[tuple[int, int]]) -> None:
        """Of memory of this process."""
        _say(number, hashes=[hashlib.sha256(ctypes.string_at(*span)).hexdigest() for span in spans])

    def _step(self) -> bool:
        """Return False when nothing came of the step: the engine is idle, or waits for a load."""
        outputs = self._times.measure(self._engine)
        for output in outputs:
            if output.finished:
                self._tell(output)
        return bool(outputs)

    def _tell(self, output: Any) -> None:
        (completion,) = output.outputs
        tokens = list(completion.token_ids)
        logprobs = completion.logprobs or []
        _say(
            int(output.request_id),
            tokens=tokens,
            logprobs=[each[token].logprob for token, each in zip(tokens, logprobs, strict=True)],
            finish_reason=completion.finish_reason,
            cached=output.num_cached_tokens,
            external_hits=_external_hits(self._llm),
        )

    def _read_commands(self) -> None:
        for line in sys.stdin:
            self._commands.put(json.loads(line))
        self._commands.put(None)


def _say(number: int, **result: Any) -> None:
    print("RESULT " + json.dumps({"number": number, **result}), flush=True)


def _external_hits(llm: LLM) -> int:
    """Return vLLM's own count of tokens that came through the connector since the start."""
    return sum(int(each.value) for each in llm.get_metrics() if each.name == "vllm:external_prefix_cache_hits")


def _busy_s() -> float:
    """How long this process's first thread has run, or could have run had a core been free."""
    with open("/proc/self/schedstat") as file:
        waited_ns = int(file.read().split()[1])
    return time.thread_time() + waited_ns / 1e9


def _make_engine(model: str, connector: str) -> LLM:
    return LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 * 1024 * 1024,
        disable_log_stats=False,
        async_scheduling=False,  # each step computes what it scheduled, so that a step's time is its own
        **({} if connector == "-" else {"kv_transfer_config": json.loads(connector)}),
    )


def main() -> None:
    faulthandler.enable()
    call_recording.install()
    driver = Driver(llm := _make_engine(sys.argv[1], sys.argv[2]))
    _say(0)
    driver.run()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
