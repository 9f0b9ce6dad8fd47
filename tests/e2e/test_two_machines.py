"""A service on two machines: the roles of docs/operations.md, "Several machines", as typed, with a secret.

Machine A has master, conductor, front end and a node; machine B has another node. KV crosses the wire between workers
and between a worker and the pool, the tokens are those of one process alone, and a worker with another secret is
told so, as is whoever asked.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machines_lab import Machine, MachinesLab, RoleProcess, missing
from waiting import wait_until

REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

BLOCK_TOKENS = 16
PAGE_NBYTES = 3 * 2 * 2 * BLOCK_TOKENS * 8 * 4  # of the tiny llama
NUM_PAGES = 128
VOCAB = 211
MAX_TOKENS = 20


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(num_tokens)]


def words(tokens: list[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


def tokens_of(text: str) -> list[int]:
    return [int(word.removeprefix("t")) for word in text.split()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The tiny llama, with a tokenizer whose words say which tokens they are."""
    import tokenizers
    from tiny_llama import SMALLEST, save_tiny_llama

    folder = tmp_path_factory.mktemp("tiny") / "model"
    save_tiny_llama(folder, SMALLEST)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{n}": n for n in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }} {% endfor %}t3"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOONPOOL_CACHE", str(folder.parent / "cache"))
        yield folder


def alone(model: Path, prompt: list[int]) -> list[int]:
    """What one process answers."""
    from moonpool.engine.config import EngineConfig
    from moonpool.engine.load import load_engine
    from moonpool.engine.sequence import SamplingParams

    engine = load_engine(str(model), EngineConfig(num_pages=NUM_PAGES, block_tokens=BLOCK_TOKENS, threads=1))
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    return engine.generate([prompt], params)[0].tokens


class TwoMachines:
    """The roles that stay, and how workers are started beside them."""

    def __init__(self, a: Machine, b: Machine, model: Path) -> None:
        self.a, self.b, self._model = a, b, model
        self.secret = a.folder.parent / "secret"
        self.wrong_secret = a.folder.parent / "other"
        for path in (self.secret, self.wrong_secret):
            path.write_text(f"{path.name} {'0123456789abcdef' * 2}\n")
            path.chmod(0o600)
        self.url = f"http://{a.address}:8000"
        self.workers: dict[str, RoleProcess] = {}
        self.master, self.conductor = f"tcp:{a.address}:7700", f"tcp:{a.address}:7800"

    def start_roles(self) -> None:
        self.a.start(
            "master", "master", "--data-dir", str(self.a.folder / "data"), "--listen", self.master
        ).ready()  # fmt: skip
        conductor = ("--listen", self.conductor, "--master", self.master)
        frontend = (
            *("--model", str(self._model), "--conductor", self.conductor, "--master", self.master),
            *("--state-dir", str(self.a.folder / "state"), "--listen", f"tcp:{self.a.address}:8000"),
        )
        started = [
            self.a.start("conductor", "conductor", *conductor),
            self._node(self.a, "n-a", "--tcp-host", self.a.address, "--tcp-port", "7701"),
            self._node(self.b, "n-b", "--tcp-host", "auto", "--numa-node", "0"),
            self.a.start("frontend", "frontend", *frontend),
        ]
        self.conductor_role, self.node_a, self.node_b, self.frontend = [role.ready() for role in started]

    def _node(self, machine: Machine, name: str, *wires: str) -> RoleProcess:
        own = ("--name", name, "--master", self.master, "--dram", str(8 << 20))
        files = ("--run-dir", str(machine.run_dir), "--secret-file", str(self.secret))
        return machine.start(name, "node", *own, *files, *wires)

    def worker(self, machine: Machine, role: str, name: str, secret: Path | None = None) -> RoleProcess:
        """Not yet ready."""
        self.workers[name] = machine.start(
            name,
            "worker",
            *("--name", name, "--role", role, "--model", str(self._model), "--listen", f"tcp:{machine.address}:0"),
            *("--conductor", self.conductor, "--master", self.master, "--tcp-host", machine.address),
            *("--run-dir", str(machine.run_dir), "--secret-file", str(secret or self.secret), "--threads", "1"),
            *("--block-tokens", str(BLOCK_TOKENS), "--kv", str(NUM_PAGES * PAGE_NBYTES)),
            env={"OMP_NUM_THREADS": "1"},
        )
        return self.workers[name]

    def keep_workers(self, *names: str) -> None:
        for name in self.workers.keys() - set(names):
            self.workers.pop(name).kill()
        wait_until(lambda: self._known_workers() == set(names), "the conductor knows these alone")

    def _known_workers(self) -> set[str]:
        page = self.a.http(f"{self.url}/metrics").text
        return set(re.findall(r'^moonpool_worker_num_pages{[^}]*moonpool_name="([^"]+)"', page, re.M))

    def complete(self, prompt: list[int]) -> Any:
        body = {"model": "model", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        return self.a.http(f"{self.url}/v1/completions", body)

    def metric(self, name: str, instance: str) -> float:
        page = self.a.http(f"{self.url}/metrics").text
        found = re.findall(rf'^{name}{{[^}}]*moonpool_name="{instance}"[^}}]*}} (\S+)$', page, re.M)
        assert found, f"no {name} of {instance}:\n{page}"
        return sum(map(float, found))


@pytest.fixture(scope="module")
def two(model: Path) -> Iterator[TwoMachines]:
    with MachinesLab(2) as [a, b]:
        machines = TwoMachines(a, b, model)
        machines.start_roles()
        yield machines


def test_tokens_and_blocks_cross_the_wire(two: TwoMachines, model: Path) -> None:
    prompt = prompt_of(600, seed=1)
    num_blocks = len(prompt) // BLOCK_TOKENS
    starting = [two.worker(two.a, "prefill", "p-a"), two.worker(two.b, "decode", "d-b")]
    expected = alone(model, prompt)
    p_a, d_b = [worker.ready() for worker in starting]
    assert re.search(rf"serves d-b/kv, .* reached by shm, tcp {re.escape(two.b.address)}:\d+$", d_b.log(), re.M)
    assert re.search(
        rf"mounted n-b.dram, 8.* at cpu:0, reached by shm, tcp {two.b.address}:\d+$", two.node_b.log(), re.M
    )
    assert "WARNING" not in two.node_a.log() + two.node_b.log() + p_a.log() + d_b.log(), "all ports are guarded"

    before = two.b.received_nbytes()
    cold = two.complete(prompt)
    assert cold.status == 200, cold.text
    assert tokens_of(cold.body["choices"][0]["text"]) == expected
    assert cold.body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    handed = two.metric("moonpool_worker_handoff_bytes_total", "p-a")
    assert handed == -(-len(prompt) // BLOCK_TOKENS) * PAGE_NBYTES
    assert two.b.received_nbytes() - before > handed, "the KV went by the wire"
    wait_until(lambda: two.metric("moonpool_pool_objects", "master") > num_blocks, "prompt and answer are stored")

    p_a.kill()
    two.worker(two.b, "prefill", "p-b").ready()
    before = two.b.received_nbytes()
    warm = two.complete(prompt)
    assert tokens_of(warm.body["choices"][0]["text"]) == expected
    assert warm.body["usage"]["prompt_tokens_details"]["cached_tokens"] == num_blocks * BLOCK_TOKENS
    pulled = two.metric("moonpool_worker_pool_read_bytes_total", "p-b")
    assert pulled == num_blocks * PAGE_NBYTES
    assert two.b.received_nbytes() - before > pulled, "A's node had the blocks, B's worker has them now"

    chat = [{"role": "user", "content": words(prompt)}]
    talk = {"model": "model", "messages": chat, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = two.b.http(f"{two.url}/v1/chat/completions", talk).body
    assert tokens_of(answer["choices"][0]["message"]["content"]) == alone(model, [*prompt, 3])


def test_a_worker_with_another_secret(two: TwoMachines, model: Path) -> None:
    """Nothing can be handed over to it. An answer whose prompt the pool has goes on there all the same: it computes the
    prompt again. A prompt of less than a block is not in the pool."""
    starting = [
        two.worker(two.a, "prefill", "p-a2"),
        two.worker(two.b, "decode", "d-w", secret=two.wrong_secret),
    ]
    prefill, decode = [worker.ready() for worker in starting]
    two.keep_workers("p-a2", "d-w")
    refused = two.complete(prompt_of(BLOCK_TOKENS - 6, seed=2))
    assert refused.status == 503
    assert "secret_file" in refused.body["error"]["message"]
    said = [line for line in prefill.log().splitlines() if "cannot write to the decode worker" in line]
    assert len(said) == 1, "once, though it was tried several times"
    assert "secret_file" in said[0]
    assert f"{two.a.address} was not let in: the caller's secret is not the owner's" in decode.log()
    prompt = prompt_of(100, seed=2)
    resumed = two.complete(prompt)
    assert resumed.status == 200, resumed.text
    assert tokens_of(resumed.body["choices"][0]["text"]) == alone(model, prompt)


@pytest.mark.soak
def test_a_refusal_takes_less_than_15_s(two: TwoMachines) -> None:
    """Attempts and their pauses, on a machine that has nothing else to do."""
    starting = [two.worker(two.a, "prefill", "p-a3"), two.worker(two.b, "decode", "d-w3", secret=two.wrong_secret)]
    for worker in starting:
        worker.ready()
    two.keep_workers("p-a3", "d-w3")
    began_s = time.monotonic()
    refused = two.complete(prompt_of(BLOCK_TOKENS - 6, seed=3))
    took_s = time.monotonic() - began_s
    print(f"refused after {took_s:.2f} s")
    assert refused.status == 503
    assert took_s < 15


def test_commands_by_hand_need_the_secret_too(two: TwoMachines, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kept on A")
    env = {"MOONPOOL_MASTER": two.master}
    assert two.a.moonpool("put", str(tmp_path / "file"), "--key", "k", env=env).returncode == 0, "by shared memory"
    refused = two.b.moonpool("get", "k", env=env)
    assert refused.returncode == 1
    assert len(refused.stderr.splitlines()) == 1
    assert "MOONPOOL_SECRET_FILE" in refused.stderr
    assert two.b.moonpool("get", "k", env={**env, "MOONPOOL_SECRET_FILE": str(two.secret)}).stdout == "kept on A"
