"""Any process of a running service is killed under load, those included of which there is only one: every answer is
whole and right, but for those that a front end held when it was killed (kill_storm.py). test_kill_storm.py has the
short form."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from e2e_service import Service, running
from kill_storm import Storm, answers, is_whole, storm
from random_model import small_model, token_prompt
from waiting import wait_until

POOL_AND_FRONT = ["master", "node", "conductor", "frontend"]


def body_of(number: int) -> dict[str, Any]:
    """Half of the prompts share their first blocks with others, so that the pool is used too."""
    prompt = token_prompt(128, seed=0) * (number % 2) + token_prompt(60 + 17 * (number % 9), seed=number)
    limits = {"max_tokens": 24 + 8 * (number % 5), "temperature": 0, "ignore_eos": True}
    return {"model": "small", "prompt": prompt, **limits}


def check(service: Service, found: Storm) -> None:
    found.check()
    wait_until(lambda: is_whole(service), "every role is back")
    assert answers(service, 2, body_of) == found.expected[:2]


@pytest.mark.soak
def test_28_kills_in_150_s(tmp_path: Path) -> None:
    model = small_model(tmp_path / "small")
    options = ("--model", str(model), "--random-weights", "--prefill", "2", "--decode", "2")
    with running(tmp_path, *options) as service:
        expected = answers(service, 16, body_of)
        rng, victims = random.Random(11), list[str]()
        while len(victims) < 28:
            victims += rng.sample([*POOL_AND_FRONT, "prefill-0", "prefill-1", "decode-0", "decode-1"], 8)
        check(service, storm(service, victims[:28], 150 / 28, expected, body_of, num_clients=4))
