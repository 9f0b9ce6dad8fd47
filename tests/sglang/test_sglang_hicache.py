"""Real SGLang with its own `mooncake` HiCache backend on the pool: a second engine, started after the first has ended,
gets its KV from there. Then the pool fails in every way while that engine works. Each test uses prompts of its own.

stand_ins/sitecustomize.py names what stands in for a GPU; the engine, its radix cache, its cache controller with its
threads and its storage backend are SGLang's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from engine_pool import NUM_PROMPT_TOKENS, EnginePool, prompt_of, resume_after, stop
from sglang_engine import OBJECTS, SglangEngine, Stored, object_hashes
from waiting import wait_until

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
FEWEST_LOADED = NUM_PROMPT_TOKENS * 9 // 10
STOPPED_S = 12.0
LONGEST_HELD_UP_S = STOPPED_S / 4  # beyond what computing again takes, per outage; it is printed
CHECKSUM_MISMATCH = -801
CALLS = ("exist", "get")


def check_hit(engine: SglangEngine, stored: Stored, seed: int) -> None:
    answer = engine.generate(prompt_of(seed))
    assert answer.tokens == stored.answers[seed].tokens
    assert answer.cached >= FEWEST_LOADED


def num_records(engine: SglangEngine) -> dict[str, int]:
    return {op: len(engine.records(op)) for op in CALLS}


@contextmanager
def outage(engine: SglangEngine, end: Callable[[], None]) -> Iterator[None]:
    """All look-ups and loads within together are held up by the pool once, and briefly. `end` ends the outage."""
    before = num_records(engine)
    try:
        yield
    finally:
        end()
    held_s = [row["held_s"] for op, number in before.items() for row in engine.records(op, number)]
    print(f"held up {sum(held_s):.3f} s in {len(held_s)} calls")
    assert sum(held_s) <= LONGEST_HELD_UP_S


def test_the_second_engine_loads_what_the_first_stored(engine: SglangEngine, stored: Stored) -> None:
    before = num_records(engine)
    check_hit(engine, stored, 1)
    loaded = object_hashes(engine.records("get", before["get"]), lambda code: code > 0)
    assert loaded == {key: stored.hashes[key] for key in stored.keys[1]}  # the bytes in the memory of both
    assert len(set(loaded.values())) == OBJECTS  # of which no two are alike


def test_wrong_bytes_are_computed_again(engine: SglangEngine, stored: Stored, pool: EnginePool) -> None:
    spoiled = stored.keys[2][OBJECTS // 2]
    pool.zero(f"mooncake/default/{spoiled}".encode())
    before, corrupt = num_records(engine), engine.counters()["corrupt_replicas"]
    answer = engine.generate(prompt_of(2))
    assert answer.tokens == stored.answers[2].tokens
    assert answer.cached < FEWEST_LOADED
    rows = engine.records("get", before["get"])
    assert {code for row in rows for key, code in zip(row["keys"], row["codes"], strict=True) if key == spoiled} == {
        CHECKSUM_MISMATCH
    }
    assert object_hashes(rows, lambda code: code > 0).items() <= stored.hashes.items()
    assert engine.counters()["corrupt_replicas"] == corrupt + 1


def test_a_stopped_master_holds_nothing_up(engine: SglangEngine, stored: Stored, pool: EnginePool) -> None:
    stop(pool.master.process)
    with outage(engine, resume_after(pool.master, STOPPED_S)):
        for seed in (3, 4):
            assert engine.generate(prompt_of(seed)).tokens == stored.answers[seed].tokens
    wait_for_pool(engine, stored, 5)


def test_a_killed_master_holds_nothing_up(engine: SglangEngine, stored: Stored, pool: EnginePool) -> None:
    pool.kill_master()
    with outage(engine, pool.restart_master):
        assert engine.generate(prompt_of(6)).tokens == stored.answers[6].tokens
    wait_for_pool(engine, stored, 7)


def test_a_stopped_node_holds_nothing_up(engine: SglangEngine, stored: Stored, pool: EnginePool) -> None:
    """Stopped for longer than the master waits for a node: it comes back empty."""
    saved = pool.saved()
    stop(pool.node.process)
    with outage(engine, resume_after(pool.node, STOPPED_S)):
        for seed in (8, 9):
            assert engine.generate(prompt_of(seed)).tokens == stored.answers[seed].tokens
    pool.put_back(saved)
    wait_for_pool(engine, stored, 10)


def test_a_killed_node_holds_nothing_up(engine: SglangEngine, stored: Stored, pool: EnginePool) -> None:
    saved = pool.saved()
    pool.kill_node()
    with outage(engine, pool.restart_node):
        assert engine.generate(prompt_of(11)).tokens == stored.answers[11].tokens
    pool.put_back(saved)
    wait_for_pool(engine, stored, 12)


def wait_for_pool(engine: SglangEngine, stored: Stored, seed: int) -> None:
    """Wait until the engine's store reaches the pool again, then expect a full hit."""
    new = iter(range(10_000, 20_000))
    wait_until(lambda: _is_stored(engine, next(new)), "the engine stores again")
    check_hit(engine, stored, seed)


def _is_stored(engine: SglangEngine, new_seed: int) -> bool:
    """Compute a new prompt. Return whether the engine could store all of it."""
    before = len(engine.stored())
    engine.generate(prompt_of(new_seed))
    until_s = time.monotonic() + 3.0
    while time.monotonic() < until_s:
        if len(engine.stored()) >= before + OBJECTS:
            return True
        time.sleep(0.05)
    return False
