"""Replicas that leave their object while a reader may remember them: when their key is settled again."""

from __future__ import annotations

import pytest
from state_pool import Grant, Pool

from moonpool.base.errors import NotSettled, PeerLost, StaleGeneration
from moonpool.store.messages import OrderKind


def is_settled(pool: Pool, key: bytes = b"k") -> bool:
    try:
        pool.state.check_settled([key], pool.now_s)
    except NotSettled:
        return False
    return True


@pytest.fixture
def pool() -> Pool:
    """One object on two nodes, leased by a reader."""
    made = Pool("a", "b", lease_s=10.0)
    made.put(b"k", num_replicas=2)
    made.use(b"k")
    return made


def test_a_forced_removal_is_settled_when_all_nodes_have_voided_it(pool: Pool) -> None:
    assert pool.remove(b"k", force=True)
    assert not is_settled(pool)
    (order,) = pool.orders("a")
    assert order.kind is OrderKind.VOID
    assert order.key == b"k"
    pool.answer(order)
    assert not is_settled(pool)
    pool.carry_out("b")
    assert is_settled(pool)


def test_what_nobody_remembers_is_settled_at_once(pool: Pool) -> None:
    pool.now_s = 10.0
    assert pool.remove(b"k")
    assert is_settled(pool)
    assert not pool.orders("a")


@pytest.mark.parametrize("error", [PeerLost("gone"), StaleGeneration("refused")])
def test_a_node_that_may_not_have_done_it_is_waited_for(pool: Pool, error: PeerLost | StaleGeneration) -> None:
    pool.now_s = 4.0
    pool.remove(b"k", force=True)
    pool.carry_out("b")
    pool.answer(pool.orders("a")[0], error)
    pool.now_s = 9.9
    assert not is_settled(pool)
    pool.now_s = 10.0
    assert is_settled(pool), "the reader's lease is over"


def can_end(pool: Pool, grant: Grant) -> bool:
    try:
        pool.state.check_can_end([grant.key], [grant.generation], pool.now_s)
    except NotSettled:
        return False
    return True


def remembered_s(pool: Pool, key: bytes = b"k") -> float:
    """For how long a reader that looks the key up now remembers where it is."""
    (info,) = pool.state.lookup([key], pool.now_s)
    assert info is not None
    return info.remember_s


def test_an_upsert_waits_until_the_old_value_is_void(pool: Pool) -> None:
    (old,) = pool.state.lookup([b"k"], pool.now_s)
    grant = pool.start(b"k", replace=True)
    assert not can_end(pool, grant)
    assert pool.state.lookup([b"k"], pool.now_s, lease=False)[0] is not None, "readers that ask find the old value"
    assert remembered_s(pool) == 0.0
    assert old is not None
    renewed = pool.state.renew_leases([b"k"], [old.replicas[0].generation], pool.now_s)
    assert renewed.is_there == [False]
    orders = pool.carry_out("a", "b")
    assert [order.kind for order in orders] == [OrderKind.VOID] * 2, "ordered when the put started, and once"
    assert can_end(pool, grant)
    pool.end(grant)
    assert is_settled(pool)
    assert not pool.orders("a")
    assert not pool.orders("b")
    assert remembered_s(pool) == 10.0


def test_a_late_report_renews_no_replica_that_has_left(pool: Pool) -> None:
    """A reader remembers two replicas; after its lease one of them leaves, and nobody has to void it any more. If the
    reader then went on to remember both, an upsert would void one, and the reader find the old value in the other.
    """
    (old,) = pool.state.lookup([b"k"], pool.now_s)
    assert old is not None
    pool.now_s = 20.0
    assert pool.state.remove_replicas([b"k"], [old.replicas[1].segment], pool.now_s) == [True]
    pool.check()
    assert (pool.orders("a"), pool.orders("b")) == ([], [])
    last = max(each.generation for each in old.replicas)
    assert pool.state.renew_leases([b"k"], [last], pool.now_s, (2,)).is_there == [False]


def test_an_upsert_waits_no_longer_than_the_lease_of_those_who_remember(pool: Pool) -> None:
    grant = pool.start(b"k", replace=True)
    pool.now_s = 9.9
    assert remembered_s(pool) == 0.0, "and leases it for longer than anybody remembers it"
    assert not can_end(pool, grant)
    pool.now_s = 10.0
    assert can_end(pool, grant)
    pool.end(grant)
    assert is_settled(pool)


def test_an_upsert_of_what_nobody_remembers_waits_for_nobody(pool: Pool) -> None:
    pool.now_s = 10.0
    grant = pool.start(b"k", replace=True)
    assert remembered_s(pool) == 0.0
    assert can_end(pool, grant)
    pool.end(grant)
    assert is_settled(pool)
    assert not pool.orders("a")


def test_an_upsert_that_is_given_up_leaves_the_old_value_readable(pool: Pool) -> None:
    grant = pool.start(b"k", replace=True)
    pool.carry_out("a", "b")
    pool.state.put_revoke([b"k"], [grant.generation], True, pool.now_s)
    assert remembered_s(pool) == 10.0
    again = pool.start(b"k", replace=True)
    assert not can_end(pool, again), "readers may remember it again; that its header is void costs them a question"
    pool.carry_out("a", "b")
    assert can_end(pool, again)


def test_a_restarted_master_voids_what_an_unfinished_upsert_replaces(pool: Pool) -> None:
    grant = pool.start(b"k", replace=True)
    pool.restart()
    pool.beat()
    assert remembered_s(pool) == 0.0
    assert not can_end(pool, grant)
    pool.carry_out("a", "b")
    assert can_end(pool, grant)


def test_a_new_value_waits_until_the_removed_one_is_void(pool: Pool) -> None:
    pool.remove(b"k", force=True)
    grant = pool.start(b"k")
    assert not can_end(pool, grant)
    pool.carry_out("a", "b")
    assert can_end(pool, grant)


def test_an_upsert_waits_for_replicas_that_left_before_it(pool: Pool) -> None:
    (info,) = pool.state.lookup([b"k"], pool.now_s)
    assert info is not None
    bad = info.replicas[0]
    pool.state.report_corrupt(b"k", bad.generation, bad.segment, bad.offset, pool.now_s)
    grant = pool.start(b"k", replace=True)
    for order in pool.orders("b"):
        pool.answer(order)
    assert not can_end(pool, grant)
    pool.carry_out("a")
    assert can_end(pool, grant)


def test_a_removal_does_not_wait_for_what_happens_to_its_keys_later(pool: Pool) -> None:
    pool.remove(b"k", force=True)
    number = pool.state.voids.last_number
    pool.carry_out("a", "b")
    pool.put(b"k")
    pool.use(b"k")
    pool.remove(b"k", force=True)
    assert not is_settled(pool)
    pool.state.check_settled([b"k"], pool.now_s, number)


def test_a_corrupt_replica_is_voided(pool: Pool) -> None:
    (info,) = pool.state.lookup([b"k"], pool.now_s)
    assert info is not None
    bad = info.replicas[0]
    assert pool.state.report_corrupt(b"k", bad.generation, bad.segment, bad.offset, pool.now_s)
    (order,) = pool.carry_out("a", "b")
    assert (order.kind, order.source) == (OrderKind.VOID, bad)


@pytest.mark.parametrize("how", ["journal", "snapshot"])
def test_a_restarted_master_waits_as_the_old_one_did(pool: Pool, how: str) -> None:
    pool.remove(b"k", force=True)
    if how == "snapshot":
        pool.snapshot()
    pool.restart()
    assert not is_settled(pool)
    pool.now_s += 10.0
    assert is_settled(pool)


def test_a_removal_by_pattern_waits_for_its_own_keys_only(pool: Pool) -> None:
    pool.put(b"later")
    pool.use(b"later")
    pool.state.remove_matching("^k$", True, 0, pool.now_s)
    number = pool.state.voids.last_number
    pool.remove(b"later", force=True)
    assert not pool.state.voids.settled_up_to(number, pool.now_s)
    for node in ("a", "b"):
        for order in pool.orders(node):
            if order.key == b"k":
                pool.answer(order)
    assert pool.state.voids.settled_up_to(number, pool.now_s)
    assert not is_settled(pool, b"later")


def test_a_silent_node_is_given_up_when_nobody_remembers_it() -> None:
    pool = Pool("a", lease_s=10.0, segment_ttl_s=10.0)
    pool.put(b"k")
    for now_s, remember_s in ((0.0, 10.0), (4.0, 6.0), (9.0, 1.0)):
        pool.now_s = now_s
        (info,) = pool.state.lookup([b"k"], now_s)
        assert info is not None
        assert info.remember_s == remember_s
    pool.beat()
    pool.now_s = 9.5
    assert pool.state.voids.remember_s(pool.now_s) == 9.5


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_name_that_another_process_takes_leaves_its_leased_keys_unsettled(is_gone: bool) -> None:
    pool = Pool("a", "b", lease_s=20.0, segment_ttl_s=15.0)
    pool.put(b"k", num_replicas=2)
    pool.put(b"one", preferred=("a.dram",))
    pool.use(b"k", b"one")
    if is_gone:
        pool.state.members.disconnected("a.dram", 1, pool.now_s)
    pool.now_s = 5.0
    pool.beat("b")
    pool.mount("a")
    assert pool.state.exist([b"k", b"one"], pool.now_s) == [True, False]
    for key in (b"k", b"one"):
        assert is_settled(pool, key) is is_gone, "the node was silent, and readers may reach it until it is given up"
    pool.now_s = 15.0
    assert is_settled(pool, b"one")
    assert is_settled(pool, b"k")
