"""`moonpool role` on a running service: workers change what they compute, and answers stay the same."""

from __future__ import annotations

import subprocess
import sys

import pytest
from e2e_service import Service, wait_until
from random_model import token_prompt

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


def role(service: Service, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moonpool", "role", *words, "--conductor", service.address("conductor")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_roles_change_while_the_service_runs(two_each: Service) -> None:
    prompt = token_prompt(300, 7)
    expected = two_each.generate(prompt).tokens
    done = role(two_each, "decode-1", "prefill")
    assert (done.returncode, done.stdout) == (0, "decode-1 is a prefill worker\n"), done.stderr
    last = role(two_each, "decode-0", "prefill")
    assert last.returncode == 1
    assert "decode-0 is the only decode worker" in last.stderr
    for name in ("prefill-0", "prefill-1"):
        done = role(two_each, name, "decode")
        assert done.returncode == 0, done.stderr
    before = two_each.stats("decode-1").handoff_nbytes
    answers = two_each.generate_all([prompt, token_prompt(300, 8), token_prompt(300, 9)])
    assert answers[0].tokens == expected
    assert [answer.num_attempts for answer in answers] == [1, 1, 1]
    wait_until(lambda: two_each.stats("decode-1").handoff_nbytes > before, 10, "the only prefill worker has computed")
    auto = role(two_each, "decode-1", "auto")
    assert auto.stdout == "decode-1 is a prefill worker; the conductor may change that\n", auto.stderr
    for name in ("prefill-0", "prefill-1", "decode-1"):
        assert role(two_each, name, name.split("-")[0]).returncode == 0
    assert two_each.generate(prompt).tokens == expected
