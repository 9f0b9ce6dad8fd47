"""Real vLLM with real LMCache on the pool: a second engine, started after the first has ended, gets its KV from there.
Then the pool fails in every way while that engine works. Each test uses prompts of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from engine_pool import NUM_PROMPT_TOKENS, EnginePool, prompt_of, resume_after, stop
from lmcache_engine import CHUNKS, LmcacheEngine, Stored, chunk_hashes
from waiting import wait_until

from moonpool.integrations.lmcache import LmcacheSettings

pytestmark = [pytest.mark.lmcache, pytest.mark.timeout(900)]
FEWEST_LOADED = NUM_PROMPT_TOKENS * 9 // 10
LONGEST_HELD_UP_S = 0.25  # beyond what computing again takes, per outage
STOPPED_S = 12.0


def check_hit(engine: LmcacheEngine, stored: Stored, seed: int) -> None:
    answer = engine.generate(prompt_of(seed))
    assert answer.tokens == stored.answers[seed].tokens
    assert answer.cached >= FEWEST_LOADED


def num_records(engine: LmcacheEngine) -> dict[str, int]:
    return {op: len(engine.records(op)) for op in ("look_up", "load", "held")}


@contextmanager
def outage(engine: LmcacheEngine, end: Callable[[], None]) -> Iterator[None]:
    """All look-ups and loads within together are held up by the pool once, and briefly. `end` ends the outage."""
    before = num_records(engine)
    try:
        yield
    finally:
        end()
    held_s = [row["held_s"] for row in engine.records("held", before["held"])]
    print(f"held up {sum(held_s):.3f} s in {len(held_s)} calls")
    assert sum(held_s) <= LONGEST_HELD_UP_S


def test_the_second_engine_loads_what_the_first_stored(engine: LmcacheEngine, stored: Stored) -> None:
    before = num_records(engine)
    check_hit(engine, stored, 1)
    loaded = chunk_hashes(engine.records("load", before["load"]))
    assert loaded == {key: stored.hashes[key] for key in stored.keys[1]}  # the bytes in the memory of both
    assert len(set(loaded.values())) == CHUNKS  # of which no two are alike


def test_wrong_bytes_are_computed_again(engine: LmcacheEngine, stored: Stored, pool: EnginePool) -> None:
    spoiled = stored.keys[2][CHUNKS // 2]
    pool.zero(*LmcacheSettings().pool_keys([spoiled]))
    before = num_records(engine)
    answer = engine.generate(prompt_of(2))
    assert answer.tokens == stored.answers[2].tokens
    assert answer.cached < FEWEST_LOADED
    loaded = chunk_hashes(engine.records("load", before["load"]))
    assert spoiled not in loaded
    assert loaded.items() <= stored.hashes.items()
    wait_until(lambda: engine.counters().get("corrupt") == 1, "the wrong bytes are found")
    assert engine.counters()["failed_load_corrupt"] == 1


def test_a_stopped_master_holds_nothing_up(engine: LmcacheEngine, stored: Stored, pool: EnginePool) -> None:
    stop(pool.master.process)
    with outage(engine, resume_after(pool.master, STOPPED_S)):
        for seed in (3, 4):
            assert engine.generate(prompt_of(seed)).tokens == stored.answers[seed].tokens
    wait_for_pool(engine, stored, 5)


def test_a_killed_master_holds_nothing_up(engine: LmcacheEngine, stored: Stored, pool: EnginePool) -> None:
    pool.kill_master()
    with outage(engine, pool.restart_master):
        assert engine.generate(prompt_of(6)).tokens == stored.answers[6].tokens
    wait_for_pool(engine, stored, 7)


def test_a_stopped_node_holds_nothing_up(engine: LmcacheEngine, stored: Stored, pool: EnginePool) -> None:
    """Stopped for longer than the master waits for a node: it comes back empty."""
    saved = pool.saved()
    stop(pool.node.process)
    with outage(engine, resume_after(pool.node, STOPPED_S)):
        for seed in (8, 9):
            assert engine.generate(prompt_of(seed)).tokens == stored.answers[seed].tokens
    pool.put_back(saved)
    wait_for_pool(engine, stored, 10)


def test_a_killed_node_holds_nothing_up(engine: LmcacheEngine, stored: Stored, pool: EnginePool) -> None:
    saved = pool.saved()
    pool.kill_node()
    with outage(engine, pool.restart_node):
        assert engine.generate(prompt_of(11)).tokens == stored.answers[11].tokens
    pool.put_back(saved)
    wait_for_pool(engine, stored, 12)


def wait_for_pool(engine: LmcacheEngine, stored: Stored, seed: int) -> None:
    """Wait until the engine's plug-in reaches master and node again, then expect a full hit."""
    new = iter(range(10_000, 20_000))
    wait_until(lambda: _is_answered(engine, next(new)), "it is answered")
    wait_until(lambda: engine.counters()["unreadable_segments"] == 0, "all segments can be read")
    check_hit(engine, stored, seed)


def _is_answered(engine: LmcacheEngine, new_seed: int) -> bool:
    """Compute a new prompt. Return whether the master answered its look-ups."""
    before = num_records(engine)
    engine.generate(prompt_of(new_seed))
    rows = engine.records("look_up", before["look_up"])
    return bool(rows) and all(row["error"] == "" for row in rows)
