"""Three machines from one cluster file: they serve together, one leaves and comes back, one is cut off for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_service import wait_until
from machines_lab import LauncherProcess, Machine, MachinesLab, missing
from random_model import small_model, token_prompt
from wall_time import crowding

REASON = missing()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(300)]

FILE = """
[cluster]
model = "{model}"
random_weights = true
secret_file = "{secret}"
block_tokens = 16
kv = "64MB"
threads = 1

[machines.a]
host = "{a}"
master = true
prefill = 1
frontends = 1
dram = "32MB"

[machines.b]
host = "{b}"
decode = 1
dram = "32MB"

[machines.c]
host = "{c}"
prefill = 1
decode = 1
dram = "32MB"
"""


class Cluster:
    def __init__(self, machines: list[Machine], folder: Path) -> None:
        self.machines = dict(zip("abc", machines, strict=True))
        secret = folder / "secret"
        secret.write_text("0123456789abcdef" * 2)
        secret.chmod(0o600)
        hosts = {name: machine.address for name, machine in self.machines.items()}
        self.file = folder / "cluster.toml"
        self.file.write_text(FILE.format(model=small_model(folder / "small"), secret=secret, **hosts))
        self.url = f"http://{hosts['a']}:8000"
        self.running: dict[str, LauncherProcess] = {}

    def up(self, *names: str) -> None:
        started = {name: self.machines[name].up(self.file, name, env={"OMP_NUM_THREADS": "1"}) for name in names}
        for name, launcher in started.items():
            self.running[name] = launcher.ready()

    def ask(self, prompt: list[int]) -> tuple[int, str, float]:
        """Status, text, seconds."""
        body = {"model": "small", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        began_s = time.monotonic()
        reply = self.machines["a"].http(f"{self.url}/v1/completions", body)
        text = reply.body["choices"][0]["text"] if reply.status == 200 else reply.text
        return reply.status, text, time.monotonic() - began_s

    def missing(self) -> list[str]:
        """The roles that /health does not find."""
        found: list[str] = self.machines["a"].http(f"{self.url}/health").body["missing"]
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with MachinesLab(3) as machines:
        made = Cluster(machines, tmp_path_factory.mktemp("cluster"))
        made.up("a", "b", "c")
        wait_until(lambda: made.missing() == [], 30, "all roles are there")
        yield made


def test_one_leaves_and_comes_back_and_no_request_notices(cluster: Cluster) -> None:
    prompts = [token_prompt(200, seed) for seed in range(3)]
    expected = [cluster.ask(prompt) for prompt in prompts]
    assert [status for status, _, _ in expected] == [200] * 3, expected
    answers: list[tuple[int, str, float]] = []
    stopping = threading.Thread(target=cluster.running["c"].stop)
    stopping.start()
    while stopping.is_alive():
        answers += [cluster.ask(prompt) for prompt in prompts]
    stopping.join()
    answers += [cluster.ask(prompt) for prompt in prompts]
    assert {(status, text) for status, text, _ in answers} == {(status, text) for status, text, _ in expected}
    cluster.up("c")
    wait_until(lambda: cluster.missing() == [], 30, "all roles are there")
    assert cluster.ask(prompts[0])[:2] == expected[0][:2]


def test_a_machine_that_is_cut_off_for_10_s_delays_requests_by_5_s_at_most(cluster: Cluster) -> None:
    prompts = [token_prompt(200, seed) for seed in range(10, 13)]
    expected = [cluster.ask(prompt) for prompt in prompts]
    crowded, answers = crowding(), dict[int, list[tuple[int, str, float]]]()

    def keep_asking(number: int) -> None:
        answers[number], end_s = [], time.monotonic() + 10
        while time.monotonic() < end_s:
            answers[number].append(cluster.ask(prompts[number]))

    cluster.machines["b"].cut_link()
    try:
        threads = [threading.Thread(target=keep_asking, args=[number]) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        cluster.machines["b"].join_link()
    for number, (_, text, alone_s) in enumerate(expected):
        assert {answer[:2] for answer in answers[number]} == {(200, text)}, answers[number]
        slowest_s = max(seconds for _, _, seconds in answers[number])
        assert slowest_s <= (3 * alone_s + 5.0) * crowded, "three at once, on the workers that are left"
    wait_until(lambda: cluster.missing() == [], 30, "it is there again")
    assert [cluster.ask(prompt)[:2] for prompt in prompts] == [answer[:2] for answer in expected]
