"""vLLM's MooncakeConnector, as it is shipped, on our `mooncake.engine`: one engine computes prompts, another answers.

On a CPU it needs a stand-in for one line (examples/vllm/mooncake_on_cpu.py).
"""

from __future__ import annotations

import json
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from call_recording import SPAN_NBYTES
from vllm_pool import FEWEST_LOADED, prompt_of
from vllm_process import Answer, Connector, VllmProcess, assert_same_text
from waiting import wait_until

pytestmark = pytest.mark.vllm
StartVllm = Callable[..., VllmProcess]
Answers = dict[int, Answer]
OUTAGE_S = 12.0
MOST_HELD_UP_S = OUTAGE_S / 4  # of the engine's thread, in all its steps of one outage; it is printed
NUM_LAYERS = 4
BLOCKS_PER_PROMPT = 16  # the last of them is not full


class Pair:
    """A prefill engine and a decode engine, and the transfers between them."""

    def __init__(self, start_vllm: StartVllm) -> None:
        self._bootstrap = f"http://127.0.0.1:{(port := free_port())}"
        self.prefill = start_vllm("prefill", connector("kv_producer", port))
        self.decode = start_vllm("decode", connector("kv_consumer", port))
        self.prefill.wait_ready()
        self.decode.wait_ready()
        with urllib.request.urlopen(self._bootstrap + "/query", timeout=10) as reply:
            self._engine_id = json.load(reply)["0"]["engine_id"]

    def compute(self, seed: int) -> None:
        """The first engine computes the prompt and keeps it for the transfer of the same number."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"transfer-{seed}"}
        self.prefill.generate(prompt_of(seed), num_tokens=1, transfer=params)

    def begin_answer(self, seed: int) -> int:
        """The second engine asks for the KV and answers. Return the number of its request."""
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": self._engine_id,
            "remote_bootstrap_addr": self._bootstrap,
            "transfer_id": f"transfer-{seed}",
        }
        return self.decode.begin(prompt_of(seed), transfer=params)

    def hold_transfer(self, seed: int) -> int:
        """As begin_answer(), and the first engine waits before it sends, until "release_loads"."""
        self.prefill.ask("hold_loads")
        number = self.begin_answer(seed)
        wait_until(lambda: bool(self.prefill.ask("loads_held")["count"]), "a load is held")
        return number


def connector(role: str, bootstrap_port: int) -> Connector:
    config: dict[str, Any] = {
        "kv_connector": "MooncakeConnector",
        "kv_connector_module_path": "mooncake_on_cpu",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
    }
    env = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(bootstrap_port), "VLLM_HOST_IP": "127.0.0.1"}
    if role == "kv_consumer":
        env["VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"] = "1"  # it waits for a dead engine so long, and 60 s more
    return Connector(config, env=env)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def assert_not_held_up(engine: VllmProcess) -> None:
    times = engine.step_times()
    print(f"held up {times.sum_s:.3f} s in {times.count} steps, {times.longest_s:.3f} s at most in one")
    assert times.sum_s <= MOST_HELD_UP_S


def test_one_engine_computes_and_another_answers(start_vllm: StartVllm, right_answers: Answers) -> None:
    pair = Pair(start_vllm)
    pair.compute(1)
    answer = pair.decode.result(pair.begin_answer(1))
    assert_same_text(answer, right_answers[1])
    assert answer.external_hits >= FEWEST_LOADED

    sent = pair.prefill.records("sent")
    assert len(sent) == NUM_LAYERS * BLOCKS_PER_PROMPT
    assert {row["code"] for row in sent} == {0}
    # The second engine went on writing to the last block of each layer.
    full = [row for number, row in enumerate(sent) if (number + 1) % BLOCKS_PER_PROMPT]
    found = pair.decode.ask("hashes", spans=[(row["to"], SPAN_NBYTES) for row in full])["hashes"]
    assert found == [row["sha256"] for row in full]
    assert len(set(found)) == len(found)  # of which no two are alike
    for engine in (pair.decode, pair.prefill):
        engine.finish()


def test_the_computing_engine_is_stopped_then_killed(start_vllm: StartVllm, right_answers: Answers) -> None:
    pair = Pair(start_vllm)
    pair.decode.generate(prompt_of(2))  # an engine's first step compiles
    pair.decode.forget()
    pair.compute(1)
    promised = pair.hold_transfer(1)
    pair.prefill.lines.signal(signal.SIGSTOP)
    began = time.monotonic()
    pair.decode.step_times()
    assert_same_text(pair.decode.generate(prompt_of(2)), right_answers[2])  # computed here meanwhile
    assert_not_held_up(pair.decode)
    time.sleep(max(0.0, began + OUTAGE_S - time.monotonic()))
    pair.prefill.lines.signal(signal.SIGCONT)
    pair.prefill.ask("release_loads")
    answer = pair.decode.result(promised)
    assert_same_text(answer, right_answers[1])
    assert answer.external_hits >= FEWEST_LOADED

    pair.decode.forget()
    pair.compute(3)
    promised = pair.hold_transfer(3)
    pair.prefill.lines.kill()
    pair.decode.step_times()
    assert_same_text(pair.decode.generate(prompt_of(2)), right_answers[2])
    assert_same_text(pair.decode.result(promised), right_answers[3])  # computed here in the end
    assert_not_held_up(pair.decode)
    pair.decode.finish()


def test_the_answering_engine_is_killed(start_vllm: StartVllm, right_answers: Answers) -> None:
    pair = Pair(start_vllm)
    pair.compute(1)
    pair.hold_transfer(1)
    pair.decode.lines.kill()
    pair.prefill.step_times()
    pair.prefill.ask("release_loads")
    assert_same_text(pair.prefill.generate(prompt_of(2)), right_answers[2])
    wait_until(lambda: bool(pair.prefill.records("sent")), "it is sent")
    assert {row["code"] for row in pair.prefill.records("sent")} == {-1}
    assert_not_held_up(pair.prefill)
    pair.prefill.finish()
