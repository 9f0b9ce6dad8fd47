"""Three machines from one cluster file, joined by 1 Gbit/s and 1 ms: one is drained, leaves and comes back, one is cut
off for 10 s. Clients stream from two front ends all the time. All answers are those of the undisturbed cluster, or
clear errors of the front end that is cut off itself. In the long runs (soak) no answer stands still for more than 5 s
beyond its compute."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from machines_lab import LauncherProcess, Machine, MachinesLab, missing
from random_model import small_model, token_prompt
from severe import check_tokens
from stream_clients import SeenAnswer, StreamClients
from waiting import wait_until

DELAY_MS = 1.0
REASON = missing(delay_ms=DELAY_MS)
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

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
frontends = 1
dram = "32MB"

[machines.c]
host = "{c}"
prefill = 1
decode = 1
dram = "32MB"
"""
STILL_S = 5.0  # beyond its compute
CUT_S = 10.0
CLIENTS = {"a": 2, "b": 1}
BODIES: list[dict[str, Any]] = [
    {"model": "small", "prompt": token_prompt(200 + 40 * n, n), "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    for n in range(6)
]


class Cluster:
    def __init__(self, machines: list[Machine], folder: Path) -> None:
        self.machines = dict(zip("abc", machines, strict=True))
        secret = folder / "secret"
        secret.write_text("0123456789abcdef" * 2)
        secret.chmod(0o600)
        hosts = {name: machine.address for name, machine in self.machines.items()}
        self.file = folder / "cluster.toml"
        self.file.write_text(FILE.format(model=small_model(folder / "small"), secret=secret, **hosts))
        self.urls = {name: f"http://{host}:8000" for name, host in hosts.items()}
        ports = {"MOONPOOL_MASTER": 7700, "MOONPOOL_CONDUCTOR": 7800}
        self._env = {variable: f"tcp:{hosts['a']}:{port}" for variable, port in ports.items()}
        self.running: dict[str, LauncherProcess] = {}

    def up(self, *names: str) -> None:
        started = {name: self.machines[name].up(self.file, name, env={"OMP_NUM_THREADS": "1"}) for name in names}
        for name, launcher in started.items():
            self.running[name] = launcher.ready()
        wait_until(lambda: self.missing() == [], "all roles are there")

    def drain(self, name: str) -> None:
        ran = self.machines["a"].moonpool("drain", name, env=self._env)
        assert ran.returncode == 0, ran.stdout + ran.stderr

    def missing(self) -> list[str]:
        """The roles that /health does not find."""
        found: list[str] = self.machines["a"].http(f"{self.urls['a']}/health").body["missing"]
        return found

    @contextmanager
    def clients(self, **numbers: int) -> Iterator[dict[str, StreamClients]]:
        """Start clients on each machine, at the front end of that machine."""
        started = {
            name: StreamClients(self.machines[name], self.urls[name], BODIES, number)
            for name, number in numbers.items()
        }
        try:
            yield started
        finally:
            for each in started.values():
                each.stop()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with MachinesLab(3, rates_mbit=dict.fromkeys(range(3), 1000), delay_ms=DELAY_MS) as machines:
        made = Cluster(machines, tmp_path_factory.mktemp("cluster"))
        made.up("a", "b", "c")
        yield made


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[SeenAnswer]:
    """The answer to each question that stood still for the longest time, with as many clients as later."""
    with cluster.clients(**CLIENTS) as clients:
        wait_until(lambda: clients["a"].num_seen >= 6 and clients["b"].num_seen >= 6, "every question twice")
    seen = [each for one in clients.values() for each in one.stop()]
    assert not any(each.error for each in seen), seen
    slowest = [max((each for each in seen if each.number == n), key=lambda each: each.silence_s) for n in range(6)]
    assert {(each.number, each.text) for each in seen} == {(each.number, each.text) for each in slowest}
    return slowest


def check_answers(answers: Sequence[SeenAnswer], undisturbed: Sequence[SeenAnswer]) -> None:
    """All are whole and right."""
    for each in answers:
        assert each.error is None, each
        check_tokens([each.text], [undisturbed[each.number].text], str(each))


def check_silence(answers: Sequence[SeenAnswer], undisturbed: Sequence[SeenAnswer]) -> None:
    """An undisturbed answer computes in its longest silence, which is that before its first token. Here it is three
    times that long, because fewer workers share the work."""
    for each in answers:
        hung_s = each.silence_s - 3 * undisturbed[each.number].silence_s
        assert hung_s <= STILL_S, f"{hung_s:.1f} s beyond its compute: {each}"


def report(what: str, seen: Sequence[SeenAnswer]) -> None:
    silences = sorted(each.silence_s for each in seen)
    errors = {each.error for each in seen if each.error}
    print(f"{what}: {len(seen)} answers, longest silence {silences[-1]:.2f} s, then {silences[-2]:.2f} s; {errors}")


TIMES = pytest.mark.parametrize("checks_silence", [False, pytest.param(True, marks=pytest.mark.soak)])


@TIMES
def test_a_machine_is_drained_leaves_and_comes_back(
    cluster: Cluster, undisturbed: list[SeenAnswer], checks_silence: bool
) -> None:
    with cluster.clients(**CLIENTS) as clients:
        for name in ("c-decode-0", "c-prefill-0", "c-node"):
            cluster.drain(name)
        cluster.running["c"].stop()
        cluster.up("c")
    for name, each in clients.items():
        report(f"drained, at {name}", each.stop())
        check_answers(each.stop(), undisturbed)
        if checks_silence:
            check_silence(each.stop(), undisturbed)


def check_cut_off(
    answers: Sequence[SeenAnswer], undisturbed: Sequence[SeenAnswer], cut_s: float, joined_s: float
) -> None:
    """Answers of a front end that is cut off are right, or end with a clear error; only those that were asked for
    before all roles were back, and had not ended when the link was cut."""
    for each in answers:
        if each.error is None:
            check_tokens([each.text], [undisturbed[each.number].text], str(each))
        else:
            assert each.began_s < joined_s, f"an error of a front end that is not cut off: {each}"
            assert each.ended_s > cut_s, f"an error of a front end that is not cut off: {each}"
            assert "connection" not in each.error, each
            assert undisturbed[each.number].text.startswith(each.text), each
    assert answers[-1].error is None, answers[-1]


def cut_off(
    cluster: Cluster, name: str, clients: dict[str, StreamClients], *, serving: str | None = None
) -> tuple[float, float]:
    """Cut the machine off for 10 s, and until the front end of `serving` has given an answer that began 5 s later, and
    wait until it serves again. Return when it was cut off, and when all its roles were back."""
    wait_until(lambda: all(each.num_seen for each in clients.values()), "answers")
    cluster.machines[name].cut_link()
    cut_s = time.monotonic()
    time.sleep(CUT_S)
    if serving is not None:
        late_s, answers = cut_s + STILL_S, clients[serving]
        wait_until(lambda: any(each.began_s > late_s for each in answers.seen), "it serves meanwhile")
    cluster.machines[name].join_link()
    wait_until(lambda: cluster.missing() == [], "all roles are there again")
    joined_s = time.monotonic()  # until then a front end may find its conductor, and no worker that has come back to it
    before = {each: each.num_seen for each in clients.values()}
    wait_until(lambda: all(each.num_seen >= num + 4 for each, num in before.items()), "all front ends answer")
    return cut_s, joined_s


@TIMES
def test_a_machine_is_cut_off_for_10_s(cluster: Cluster, undisturbed: list[SeenAnswer], checks_silence: bool) -> None:
    with cluster.clients(**CLIENTS) as clients:
        cut_s, joined_s = cut_off(cluster, "b", clients, serving="a")
    outside, inside = clients["a"].stop(), clients["b"].stop()
    report("b is cut off, at a", outside)
    report("b is cut off, at b", inside)
    check_answers(outside, undisturbed)
    check_cut_off(inside, undisturbed, cut_s, joined_s)
    if checks_silence:
        check_silence([*outside, *inside], undisturbed)


@pytest.mark.soak
def test_the_machine_of_master_and_conductor_is_cut_off(cluster: Cluster, undisturbed: list[SeenAnswer]) -> None:
    """The other machines' front end reaches no conductor either."""
    with cluster.clients(**CLIENTS) as clients:
        cut_s, joined_s = cut_off(cluster, "a", clients)
    for name, each in clients.items():
        report(f"a is cut off, at {name}", each.stop())
        check_cut_off(each.stop(), undisturbed, cut_s, joined_s)
        check_silence(each.stop(), undisturbed)
