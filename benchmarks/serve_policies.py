"""Mean time to first token by policy, on live CPU workers: conversations that share a system prompt, turn after turn.

    python benchmarks/serve_policies.py [--json] [--repeat 5]

Starts the service with four prefill workers of one thread and one decode worker, and a random llama of 8 layers. Every
round runs the same shape of load, with tokens nobody has seen, once under each policy, in an order that changes; only
the conductor is started anew in between. Ratios are of the medians of the rounds' means. The claims: global / random at
most 0.6, global / local at most 1.05.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from moonpool.server.launch_child import to_arguments
from moonpool.server.launch_plan import CONDUCTOR, FRONTEND, Role, ServeConfig, plan_roles

POLICIES = ("random", "local", "global", "ours")
CLAIMS = (("random", 0.6), ("local", 1.05))
NUM_PREFILL = 4
NUM_CONVERSATIONS = 4
NUM_AT_ONCE = 2
NUM_TURNS = 8
SYSTEM_TOKENS = 256
TURN_TOKENS = 192
VOCAB = 2000
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}
ANSWER_TOKENS = 4
THINKING_S = 0.1
START_S = 120.0


def save_model(folder: Path) -> None:
    """Weights do not matter, their number does: about 6 million, so that a prompt takes a second or so of one core."""
    import tokenizers
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=torch.float32).save_pretrained(folder)
    words = {f"t{number}": number for number in range(VOCAB)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))


class Service:
    """The roles of `moonpool serve` as processes of this one, so that the conductor alone can be replaced."""

    def __init__(self, folder: Path) -> None:
        model = folder / "model"
        save_model(model)
        config = ServeConfig(
            model=str(model), prefill=NUM_PREFILL, decode=1, threads=1, port=_free_port(), log_level="ERROR"
        )
        self._roles = {role.name: role for role in plan_roles(config, folder, folder)}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = f"http://127.0.0.1:{config.port}"

    def start(self) -> None:
        for role in self._roles.values():
            self._start(role, {})

    def use(self, policy: str) -> None:
        """With a conductor that has learnt nothing yet but what the workers measured at their start."""
        self._stop(CONDUCTOR)
        self._start(self._roles[CONDUCTOR], {"policy_name": policy})
        self._wait_healthy()

    def close(self) -> None:
        for name in (FRONTEND, *self._roles):
            self._stop(name)

    def _start(self, role: Role, changes: dict[str, object]) -> None:
        arguments = to_arguments({**role.options, **changes})
        command = [sys.executable, "-m", "moonpool", role.command, *arguments]
        self._processes[role.name] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if role.name in (CONDUCTOR, "master", "node"):
            _wait(lambda: self._listens(role), f"{role.name} to start")

    def _listens(self, role: Role) -> bool:
        address = str(role.options.get("address") or role.options.get("listen") or "")
        return not address or Path(address.removeprefix("unix:")).exists()

    def _stop(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            process.terminate()
            process.wait(20)

    def _wait_healthy(self) -> None:
        def all_there() -> bool:
            page = httpx.get(f"{self.url}/metrics", timeout=10).text
            return page.count("moonpool_conductor_assigned{") >= NUM_PREFILL + 1

        _wait(all_there, "the workers to register")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _wait(holds: Callable[[], bool], what: str) -> None:
    ends_s = time.monotonic() + START_S
    while time.monotonic() < ends_s:
        try:
            if holds():
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit(f"waited {START_S:.0f} s for {what}")


def ask(url: str, prompt: list[int]) -> tuple[float, list[int]]:
    """(seconds to the first token, stand-ins for the answer's tokens: what was said does not matter, how much does)."""
    body = {
        "model": "model", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip
    started_s, ttft_s = time.perf_counter(), 0.0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: {") and not ttft_s:
                ttft_s = time.perf_counter() - started_s
    return ttft_s, list(range(3, 3 + ANSWER_TOKENS))


def mean_ttft_s(url: str, seed: int) -> float:
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(count)]

    system = tokens(SYSTEM_TOKENS)
    scripts = [[tokens(TURN_TOKENS) for _ in range(NUM_TURNS)] for _ in range(NUM_CONVERSATIONS)]

    def talk(script: list[list[int]]) -> list[float]:
        prompt, found = list(system), []
        for turn in script:
            prompt = prompt + turn
            ttft_s, answer = ask(url, prompt)
            found.append(ttft_s)
            prompt = prompt + answer
            time.sleep(THINKING_S)
        return found

    for _ in range(NUM_PREFILL):
        ask(url, tokens(64))  # connections, and something to learn from
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        return statistics.mean(ttft_s for found in threads.map(talk, scripts) for ttft_s in found)


def measure(repeat: int) -> dict[str, list[float]]:
    means: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        service = Service(Path(folder))
        try:
            service.start()
            for round_ in range(repeat):
                for place in range(len(POLICIES)):
                    policy = POLICIES[(round_ + place) % len(POLICIES)]
                    service.use(policy)
                    means[policy].append(mean_ttft_s(service.url, seed=1000 * round_ + place))
                    print(
                        f"round {round_ + 1}/{repeat} {policy} {means[policy][-1]:.3f} s", file=sys.stderr, flush=True
                    )
        finally:
            service.close()
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    medians = {policy: statistics.median(found) for policy, found in measure(options.repeat).items()}
    for policy in POLICIES:
        report(options.json, f"mean TTFT, {policy}", medians[policy], "s", medians["random"], None)
    for other, limit in CLAIMS:
        report(options.json, f"global / {other}", medians["global"], "s", medians[other], limit)


def report(as_json: bool, case: str, value: float, unit: str, baseline: float, limit: float | None) -> None:
    ratio = value / baseline
    line = {"bench": "serve_policies", "case": case, "value": round(value, 4), "unit": unit,
            "baseline": round(baseline, 4), "ratio": round(ratio, 3)}  # fmt: skip
    if limit is not None:
        line |= {"limit": limit, "ok": ratio <= limit}
    text = f"{case:<24} {value:8.3f} {unit}  ({baseline:.3f}, ratio {ratio:.3f})"
    print(json.dumps(line) if as_json else text + ("" if limit is None else f"  limit {limit}"), flush=True)


if __name__ == "__main__":
    main()
