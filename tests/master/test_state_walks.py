"""Long random walks through the events of the state machine, in the mixture of a busy pool. A seed replays its walk:

.venv/bin/pytest "tests/master/test_state_walks.py::test_a_walk[7]"
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from state_world import KEYS, NODES
from test_state_machine import PoolMachine

from moonpool.master.policies import POLICIES
from moonpool.master.state import snapshot

Draw = Callable[[random.Random], dict[str, Any]]


def some_keys(draw: random.Random) -> list[bytes]:
    return draw.sample(KEYS, draw.randint(1, 4)) if draw.random() < 0.8 else [draw.choice(KEYS)] * 2


def node(draw: random.Random) -> str:
    return draw.choice(sorted(NODES))


def chance(draw: random.Random, part: float) -> bool:
    return draw.random() < part


FATES = ["done"] * 6 + ["failed", "corrupt"]
VERBS = ["end"] * 4 + ["partly", "revoke", "leave", "renew"]
TASKS = ["copy", "move", "move", "drain", "cancel"]
# How often, which event, and what it is given.
EVENTS: list[tuple[float, str, Draw]] = [
    (6, "time_passes", lambda draw: {"seconds": draw.choice([0.05, 0.5, 2, 6]), "beats": chance(draw, 0.8)}),
    (2, "node_starts", lambda draw: {"name": node(draw)}),
    (2, "node_beats", lambda draw: {"name": node(draw), "whole": chance(draw, 0.7)}),
    (0.6, "node_dies", lambda draw: {"name": node(draw), "happens": True}),
    (0.2, "node_leaves", lambda draw: {"name": node(draw), "happens": True}),
    (6, "node_works", lambda draw: {"name": node(draw), "pick": draw.randint(0, 30), "fate": draw.choice(FATES)}),
    (4, "all_nodes_work", lambda draw: {}),
    (4, "node_answers", lambda draw: {"name": node(draw)}),
    (1, "node_reconnects", lambda draw: {"name": node(draw)}),
    (2, "node_compacts", lambda draw: {"name": node(draw)}),
    (
        4,
        "put_start",
        lambda draw: {
            "keys": some_keys(draw),
            "granules": draw.randint(1, 4),
            "replicas": draw.randint(1, 3),
            "replace": chance(draw, 0.4),
            "hard": draw.randint(0, 12),
            "session": draw.randint(0, 2),
            "group": draw.choice([b"", b"", b"g"]),
            "every": chance(draw, 0.3),
        },
    ),
    (
        8,
        "put",
        lambda draw: {
            "keys": some_keys(draw),
            "granules": draw.randint(1, 3),
            "replicas": draw.randint(1, 2),
            "replace": chance(draw, 0.4),
        },
    ),
    (5, "finish", lambda draw: {"pick": draw.randint(0, 30), "verb": draw.choice(VERBS)}),
    (
        8,
        "lookup",
        lambda draw: {"keys": some_keys(draw), "session": draw.randint(0, 6), "prefix": chance(draw, 0.3)},
    ),
    (4, "renew", lambda draw: {"pick": draw.randint(0, 30)}),
    (2, "exist", lambda draw: {"keys": some_keys(draw)}),
    (
        1,
        "pin_by_connection",
        lambda draw: {"key": draw.choice(KEYS), "connection": draw.randint(1, 2), "closes": chance(draw, 0.4)},
    ),
    (4, "unpin", lambda draw: {"key": draw.choice(KEYS), "pick": draw.randint(0, 3)}),
    (0.5, "session_ends", lambda draw: {"pick": draw.randint(0, 1), "told": chance(draw, 0.7), "happens": True}),
    (1.5, "remove", lambda draw: {"keys": some_keys(draw), "force": chance(draw, 0.5)}),
    (0.5, "reader_finds_wrong_bytes", lambda draw: {"key": draw.choice(KEYS), "pick": draw.randint(0, 5)}),
    (
        1.5,
        "task",
        lambda draw: {"key": draw.choice(KEYS), "one": node(draw), "other": node(draw), "verb": draw.choice(TASKS)},
    ),
    (3, "snapshot_goes_on", lambda draw: {}),
    (0.7, "master_crashes", lambda draw: {"happens": True}),
]


def walk(seed: int, num_events: int) -> None:
    draw = random.Random(seed)
    machine = PoolMachine()
    machine.begin(policy=draw.choice(sorted(POLICIES)))
    for _ in range(num_events):
        _, event, arguments = draw.choices(EVENTS, [weight for weight, _, _ in EVENTS])[0]
        getattr(machine, event)(**arguments(draw))
        machine.agrees_with_itself()
        machine.nothing_vanishes_without_reason()
        machine.readers_remember_no_value_that_a_settled_key_has_not()
        machine.nothing_comes_back()
        machine.listeners_know_what_is_stored()
    machine.teardown()


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "STEP_SLOTS", 3)


@pytest.mark.parametrize("seed", range(20))
def test_a_walk(seed: int) -> None:
    walk(seed, 200)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(1000, 4000, 100))
def test_many_walks(first: int) -> None:
    for seed in range(first, first + 100):
        try:
            walk(seed, 400)
        except Exception as error:
            error.add_note(f"walk({seed}, 400)")
            raise
