"""Orders to nodes, and the copies that they make: given, sent again, answered well, badly or never."""

from __future__ import annotations

from typing import Any

import pytest
from state_pool import Pool

from moonpool.base.errors import Corrupt, DeadlineExceeded, NoSpace
from moonpool.store import messages as m


def copying(**rules: Any) -> tuple[Pool, m.Order]:
    """An object on a, and the order to copy it to b."""
    pool = Pool("a", "b", **rules)
    pool.put(b"k", 2, preferred=("a.dram",))
    pool.state.copy(b"k", ["b.dram"], 0.0)
    (order,) = pool.state.orders.take_unsent("b")
    pool.check()
    return pool, order


def test_a_copy_is_ordered_from_the_node_that_gets_it() -> None:
    pool, order = copying()
    assert (order.kind, order.key, order.nbytes) == (m.OrderKind.COPY, b"k", 8192)
    found = pool.find(b"k")
    assert found is not None
    assert order.source == found.replicas[0]
    assert order.target is not None
    assert (order.target.segment, order.target.incarnation) == ("b.dram", 1)
    assert order.target.generation > order.source.generation, "an allocation of its own"
    assert pool.used == 4
    assert pool.places(b"k") == ["a.dram"], "not before it is whole"
    pool.answer(order)
    found = pool.find(b"k")
    assert found is not None
    assert found.replicas == (order.source, order.target)


def test_orders_are_sent_once_and_again_to_a_node_that_connects_anew() -> None:
    pool, order = copying()
    assert pool.state.orders.take_unsent("b") == []
    assert not pool.state.orders.unsent
    assert pool.state.orders.open_orders("b") == [order]
    pool.answer(order)
    assert pool.state.orders.open_orders("b") == []
    pool.answer(order)  # said twice
    assert pool.counters["orders_done"] == 1


def test_an_order_that_was_given_up_is_not_sent() -> None:
    pool = Pool("a", "b", order_timeout_s=60)
    pool.put(b"k", preferred=("a.dram",))
    pool.state.copy(b"k", ["b.dram"], 0.0)
    assert list(pool.state.orders.unsent) == ["b"]
    pool.tick(60)
    assert not pool.state.orders.unsent
    assert pool.state.orders.take_unsent("b") == []
    assert pool.counters["orders_in_progress"] == 0


def test_space_of_a_refused_copy_is_free_at_once() -> None:
    pool, order = copying()
    pool.answer(order, NoSpace("no"))
    assert pool.used == 2
    assert pool.counters["orders_failed"] == 1


@pytest.mark.parametrize("how", ["silence", "node says so"])
def test_space_that_a_node_may_still_write_rests(how: str) -> None:
    pool, order = copying(order_timeout_s=60, put_release_s=600)
    if how == "silence":
        pool.tick(60)
    else:
        pool.answer(order, DeadlineExceeded("the source did not answer"))
    assert pool.places(b"k") == ["a.dram"]
    assert pool.used == 4
    pool.answer(order)
    assert pool.places(b"k") == ["a.dram"], "an answer that comes too late changes nothing"
    pool.tick(600)
    assert pool.used == 2


def test_a_copy_of_what_was_removed_or_replaced_is_thrown_away() -> None:
    for replaced in (False, True):
        pool, order = copying()
        pool.remove(b"k")
        if replaced:
            pool.put(b"k", 1, preferred=("a.dram",))
        pool.answer(order)
        assert pool.used == replaced
        assert pool.places(b"k") == (["a.dram"] if replaced else [])


def test_a_corrupt_source_is_quarantined() -> None:
    pool, order = copying()
    pool.answer(order, Corrupt("wrong bytes"))
    assert not pool.has(b"k")
    assert "wrong bytes" in pool.why(b"k")
    assert pool.used == 0


def test_orders_end_with_their_node() -> None:
    pool, order = copying()
    pool.unmount("b.dram")
    assert pool.counters["orders_in_progress"] == 0
    pool.answer(order)
    assert pool.places(b"k") == ["a.dram"]
    pool.mount("b")
    assert pool.orders("b") == []


def test_one_copy_of_a_key_at_a_time() -> None:
    pool, order = copying()
    with pytest.raises(NoSpace):
        pool.state.copy(b"k", ["b.dram"], 0.0)
    pool.answer(order, NoSpace("no"))
    pool.state.copy(b"k", ["b.dram"], 0.0)
    pool.carry_out("b")
    assert pool.places(b"k") == ["a.dram", "b.dram"]


def test_a_copy_under_way_is_forgotten_with_the_master_and_its_space_with_it() -> None:
    pool, order = copying()
    pool.restart()
    assert pool.used == 2
    assert pool.orders("b") == []
    pool.answer(order)
    assert pool.places(b"k") == ["a.dram"]


def test_a_finished_copy_outlives_the_master() -> None:
    pool, order = copying()
    pool.answer(order)
    pool.restart()
    assert pool.places(b"k") == ["a.dram", "b.dram"]
    assert pool.used == 4
