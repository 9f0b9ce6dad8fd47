"""`moonpool role` on a running service: workers change what they compute, and answers stay the same."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from e2e_service import Answer, Service
from forked_cli import Command
from random_model import token_prompt
from waiting import HANG_S, wait_until


@pytest.fixture(scope="module")
def role(moonpool: Command, two_each: Service) -> Command:
    return lambda *words: moonpool("role", *words, "--conductor", two_each.address("conductor"))


def test_roles_change_while_the_service_runs(two_each: Service, role: Command) -> None:
    prompt = token_prompt(300, 7)
    expected = two_each.generate(prompt).tokens
    done = role("decode-1", "prefill")
    assert (done.returncode, done.stdout) == (0, "decode-1 is a prefill worker\n"), done.stderr
    last = role("decode-0", "prefill")
    assert last.returncode == 1
    assert "decode-0 is the only decode worker" in last.stderr
    for name in ("prefill-0", "prefill-1"):
        done = role(name, "decode")
        assert done.returncode == 0, done.stderr
    before = two_each.stats("decode-1").handoff_nbytes
    answers = two_each.generate_all([prompt, token_prompt(300, 8), token_prompt(300, 9)])
    assert answers[0].tokens == expected
    assert [answer.num_attempts for answer in answers] == [1, 1, 1]
    wait_until(lambda: two_each.stats("decode-1").handoff_nbytes > before, "the only prefill worker has computed")
    auto = role("decode-1", "auto")
    assert auto.stdout == "decode-1 is a prefill worker; the conductor may change that\n", auto.stderr
    for name in ("prefill-0", "prefill-1", "decode-1"):
        assert role(name, name.split("-")[0]).returncode == 0
    assert two_each.generate(prompt).tokens == expected


@pytest.mark.parametrize("num_changes", [4, pytest.param(20, marks=pytest.mark.soak)])
def test_no_request_is_lost_doubled_or_different_while_roles_change(
    two_each: Service, role: Command, num_changes: int
) -> None:
    """Clients ask without a pause; a worker that changes holds their prompts and answers in the middle."""
    prompts = [token_prompt(60 + 90 * number, 20 + number) for number in range(6)]
    expected = [answer.tokens for answer in two_each.generate_all(prompts, 24)]
    chance, ended = random.Random(num_changes), threading.Event()

    def ask_on(client: int) -> list[tuple[int, Answer]]:
        found: list[tuple[int, Answer]] = []
        while not ended.is_set() or len(found) < 2:
            number = (client + len(found)) % len(prompts)
            found.append((number, two_each.generate(prompts[number], 24)))
        return found

    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(ask_on, client) for client in range(3)]
        try:
            for _ in range(num_changes):
                changes = role(*_next_change(two_each, chance))
                assert changes.returncode == 0, changes.stderr
        finally:
            ended.set()
        answers = [one for client in clients for one in client.result(2 * HANG_S)]
    _restore(two_each, role)
    assert [answer.tokens for _, answer in answers] == [expected[number] for number, _ in answers]
    assert {answer.num_attempts for _, answer in answers} == {1}, "a change of roles is no failure"


def _roles(service: Service) -> dict[str, str]:
    return {worker.info.name: str(worker.info.role) for worker in service.status().workers}


def _restore(service: Service, role: Command) -> None:
    """Give each worker the role of its name again; one of a role that has several first, because the last one stays."""
    while moved := [name for name, one in _roles(service).items() if one != name.split("-")[0]]:
        roles = _roles(service)
        name = max(moved, key=lambda each: list(roles.values()).count(roles[each]))
        assert role(name, name.split("-")[0]).returncode == 0


def _next_change(service: Service, chance: random.Random) -> tuple[str, str]:
    """A worker and its other role, so that each role keeps a worker."""
    roles = _roles(service)
    common = [one for one in ("prefill", "decode") if list(roles.values()).count(one) > 1]
    name = chance.choice(sorted(name for name, one in roles.items() if one in common))
    return name, "decode" if roles[name] == "prefill" else "prefill"
