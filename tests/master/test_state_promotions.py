"""Objects that a reader asks for before it needs them: which come from SSD to memory, and how many at once."""

from __future__ import annotations

import pytest
from state_pool import G, Pool, offload, on_ssd_alone

from moonpool.base.errors import Unavailable
from moonpool.master.state import promotions
from moonpool.store import messages as m

KEYS = [b"%d" % number for number in range(6)]


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """Its budget is two objects."""
    monkeypatch.setattr(promotions, "MAX_PART", 0.2)
    pool = Pool("a", ssd_granules=100)
    on_ssd_alone(pool, *KEYS)
    return pool


def ask(pool: Pool, *keys: bytes) -> int:
    ordered = pool.state.promotions.ask(keys, pool.now_s)
    pool.check()
    return ordered


def test_what_is_asked_for_comes_to_memory_in_order_and_within_the_budget(pool: Pool) -> None:
    assert ask(pool, b"no such key", *KEYS) == 2
    found = [(order.kind, order.key, order.nbytes) for order in pool.orders("a")]
    assert found == [(m.OrderKind.COPY, key, G) for key in KEYS[:2]]
    assert ask(pool, *KEYS) == 0, "the budget is spent"
    pool.carry_out("a")
    assert [pool.places(key) for key in KEYS[:3]] == [["a.dram", "a.ssd"], ["a.dram", "a.ssd"], ["a.ssd"]]
    assert ask(pool, *KEYS) == 2, "copies that have ended take no budget"
    assert [order.key for order in pool.orders("a")] == KEYS[2:4]
    assert pool.counters["promoted"] == 4
    assert pool.counters["ssd_hits"] == 0, "no client has read yet"


@pytest.mark.parametrize("removed", [False, True])
def test_a_copy_that_fails_gives_its_budget_back(pool: Pool, removed: bool) -> None:
    assert ask(pool, *KEYS[:2]) == 2
    orders = pool.orders("a")
    for order in orders:
        if removed:
            pool.remove(order.key, force=True)
        pool.answer(order, Unavailable("the disk is busy"))
    offload(pool)
    assert ask(pool, *KEYS) == 2


def test_what_is_in_memory_is_only_leased(pool: Pool) -> None:
    pool.put(b"here")
    offload(pool)
    assert ask(pool, b"here") == 0
    assert not pool.remove(b"here"), "it is leased"
