"""Putting: two phases, their times, sessions that write in place, upserts, where replicas go, what is refused."""

from __future__ import annotations

import pytest
from state_pool import SESSION, G, Grant, Pool

from moonpool.base.errors import ConfigError, InvalidInput
from moonpool.master.rules import PoolRules
from moonpool.master.state import PoolState
from moonpool.master.state.table import Flag
from moonpool.store import messages as m


def test_an_object_is_visible_from_put_end_on() -> None:
    pool = Pool("a")
    grant = pool.start(b"k")
    assert not pool.has(b"k")
    assert "being written" in pool.why(b"k")
    assert pool.end(grant) is None
    found = pool.find(b"k")
    assert found is not None
    assert found.replicas == grant.replicas
    assert found.nbytes == G
    assert pool.end(grant) is None, "said twice"


def test_a_batch_is_positional_and_a_bad_item_fails_nobody_else() -> None:
    pool = Pool("a")
    pool.put(b"old")
    keys = [b"", b"ok", b"zero", b"big", b"old", b"ok", b"x" * 1025]
    reply = pool.state.put_start(keys, [G, G, 0, 99 * G, G, G, G], m.PutOptions(), 0.0)
    pool.check()
    codes = {at: refusal.code for at, refusal in reply.refusals.items()}
    assert codes == {
        0: "invalid_input",
        2: "invalid_input",
        3: "no_space",
        4: "already_exists",
        5: "already_exists",
        6: "invalid_input",
    }
    assert [bool(generation) for generation in reply.generations] == [at == 1 for at in range(7)]
    assert [len(places) for places in reply.replicas] == [int(at == 1) for at in range(7)]
    assert pool.counters["refused"] == 6


def test_a_batch_of_nothing_is_granted_nothing() -> None:
    pool = Pool("a")
    reply = pool.state.put_start([], [], m.PutOptions(), 0.0)
    assert (reply.generations, reply.replicas, reply.refusals) == ([], [], {})
    pool.check()


@pytest.mark.parametrize(
    ("sizes", "options", "columns"),
    [
        ([G, G], m.PutOptions(), {}),
        ([G], m.PutOptions(), {"parents": [b"p", b"q"]}),
        ([G], m.PutOptions(), {"groups": []}),
        ([G], m.PutOptions(num_replicas=0), {}),
        ([G], m.PutOptions(num_replicas=17), {}),
        ([G], m.PutOptions(), {"session": 5}),
        ([G], m.PutOptions(identity=b"i" * 65), {}),
    ],
)
def test_a_batch_that_makes_no_sense_is_refused_whole_and_takes_nothing(
    sizes: list[int], options: m.PutOptions, columns: dict[str, object]
) -> None:
    pool = Pool("a")
    with pytest.raises(InvalidInput):
        pool.state.put_start([b"k"], sizes, options, 0.0, **columns)  # type: ignore[arg-type]
    pool.check()
    assert pool.used == 0
    pool.put(b"k")


def test_generations_rise_across_lives() -> None:
    pool = Pool("a")
    first, second = pool.start(b"1"), pool.start(b"2")
    assert first.generation >> 32 == 1
    assert second.generation > first.generation
    pool.restart()
    assert pool.start(b"3").generation > second.generation


def test_a_late_put_loses_its_key_at_once_and_its_space_later() -> None:
    pool = Pool("a", granules=1)
    grant = pool.start(b"k")
    pool.tick(29.9)
    assert pool.counters["puts_in_progress"] == 1
    assert pool.refused(b"k") == "already_exists"
    pool.tick(0.1)
    assert pool.counters["discarded"] == 1
    assert "did not end it in time" in pool.why(b"k")
    assert pool.refused(b"k") == "no_space", "the key is free, the space is not: its writer may be slow"
    pool.tick(569.9)
    assert pool.refused(b"k") == "no_space"
    pool.tick(0.1)
    assert pool.start(b"k").generation > grant.generation


def test_a_key_is_free_in_time_though_nobody_ticked() -> None:
    pool = Pool("a", granules=2)
    late = pool.start(b"k")
    pool.now_s = 30.0
    pool.put(b"k")
    refusal = pool.end(late)
    assert refusal is not None
    assert refusal.code == "stale_generation"
    assert pool.has(b"k"), "the late one changes nothing"


def test_a_late_put_end_frees_the_space_for_its_writer_has_stopped() -> None:
    pool = Pool("a", granules=1)
    grant = pool.start(b"k")
    pool.tick(31)
    refusal = pool.end(grant)
    assert refusal is not None
    assert refusal.code == "stale_generation"
    pool.put(b"k")


def test_a_renewed_put_goes_on() -> None:
    pool = Pool("a", granules=3)
    slow, other = pool.start(b"slow"), pool.start(b"other")
    pool.now_s = 29.0
    renewed = pool.state.put_renew([b"slow", b"other", b"?"], [slow.generation, other.generation + 1, 5], pool.now_s)
    assert renewed == [True, False, False]
    pool.tick(2)
    assert pool.end(slow) is None
    assert pool.end(other) is not None
    assert pool.state.put_renew([b"slow"], [slow.generation], pool.now_s) == [False]


def test_revoking_frees_at_once_only_when_no_write_is_under_way() -> None:
    pool = Pool("a", granules=1)
    pool.revoke(pool.start(b"1"), settled=True)
    assert "gave the put up" in pool.why(b"1")
    unsettled = pool.start(b"2")
    pool.revoke(unsettled, settled=False)
    assert pool.refused(b"3") == "no_space"
    pool.revoke(unsettled, settled=True)  # now it has stopped
    pool.put(b"3")
    pool.revoke(unsettled, settled=True)  # unknown ones are ignored
    pool.revoke(Grant(b"3", 17, ()), settled=True)
    assert pool.has(b"3")


# processes that write in place


def test_space_of_a_living_process_is_never_granted_again() -> None:
    pool = Pool("a", granules=1)
    pool.start(b"k", session=SESSION)
    pool.tick(100_000)
    assert pool.counters["discarded"] == 1
    assert pool.refused(b"other") == "no_space", "it may be stopped in the middle of a write"
    pool.sessions_gone(SESSION + 1)
    assert pool.refused(b"other") == "no_space"
    pool.sessions_gone(SESSION)
    pool.put(b"other")


def test_a_process_that_says_it_stopped_gives_its_space_back() -> None:
    pool = Pool("a", granules=2)
    discarded, revoked = pool.start(b"1", session=SESSION), pool.start(b"2", session=SESSION)
    pool.revoke(revoked, settled=False)
    pool.tick(31)
    assert pool.refused(b"3") == "no_space"
    assert pool.end(discarded) is not None
    pool.revoke(revoked, settled=True)
    assert pool.used == 0
    pool.sessions_gone(SESSION)
    pool.put(b"3", 2)


def test_unfinished_puts_end_with_their_process() -> None:
    pool = Pool("a", granules=2)
    pool.start(b"mine", session=SESSION)
    pool.start(b"others")
    pool.sessions_gone(SESSION)
    assert pool.used == 1
    assert pool.counters["puts_in_progress"] == 1
    pool.put(b"mine")


# upserts


def test_an_upsert_keeps_the_old_value_readable_until_the_new_one_is_whole() -> None:
    pool = Pool("a", lease_s=10)
    old = pool.put(b"k")
    assert pool.refused(b"k") == "already_exists"
    new = pool.start(b"k", 2, replace=True)
    found = pool.find(b"k", lease=True)
    assert found is not None
    assert found.replicas == old.replicas
    assert pool.end(new) is None
    found = pool.find(b"k")
    assert found is not None
    assert (found.replicas, found.nbytes) == (new.replicas, 2 * G)
    assert pool.used == 3, "somebody may be reading the old value"
    pool.tick(10)
    assert pool.used == 2
    assert pool.end(old) is not None, "that one is not stored any more"


def test_an_upsert_preempts_an_unfinished_put() -> None:
    pool = Pool("a")
    slow = pool.start(b"k", replace=True, session=SESSION)
    fast = pool.start(b"k", replace=True)
    assert pool.end(fast) is None
    refusal = pool.end(slow)
    assert refusal is not None
    assert refusal.code == "stale_generation"
    found = pool.find(b"k")
    assert found is not None
    assert found.replicas == fast.replicas
    assert pool.used == 1


def test_an_upsert_of_a_new_key_is_a_put() -> None:
    pool = Pool("a")
    pool.put(b"k", replace=True)
    assert pool.has(b"k")


def test_an_upsert_takes_over_pins_and_group_if_asked_to() -> None:
    pool = Pool("a")
    pool.put(b"k", hard_pin=True, soft_pin_s=100)
    pool.put(b"k", 2, replace=True, keep_pins=True)
    table = pool.state.index.table
    slot = table.find(b"k")
    assert slot is not None
    assert table.flags[slot] & Flag.HARD_PIN
    assert table.soft_pins[slot] == 100
    pool.put(b"k", replace=True)
    slot = table.find(b"k")
    assert slot is not None
    assert not table.flags[slot] & (Flag.HARD_PIN | Flag.SOFT_PIN)
    reply = pool.state.put_start([b"g"], [G], m.PutOptions(), 0.0, groups=[b"group"])
    assert pool.state.put_end([b"g"], reply.generations, {}, 0.0) == {}
    pool.put(b"g", replace=True, keep_pins=True)
    assert table.groups == {b"group": {table.find(b"g")}}


def test_an_upsert_replaces_what_is_pinned_and_leaves_its_space_to_the_pins() -> None:
    pool = Pool("a", lease_s=1)
    pool.put(b"k", hard_pin=True)
    assert pool.pin(SESSION, b"k")
    pool.put(b"k", replace=True)
    pool.tick(5)
    assert pool.used == 2
    pool.unpin(SESSION, b"k")
    assert pool.used == 1


# replicas


def test_replicas_lie_on_distinct_nodes_first() -> None:
    pool = Pool("a", "b", "c")
    nodes = {each.segment for each in pool.put(b"k", num_replicas=2).replicas}
    assert len(nodes) == 2
    assert len(pool.put(b"all", num_replicas=3).replicas) == 3


def test_fewer_replicas_are_taken_unless_all_are_wanted() -> None:
    pool = Pool("a", "b")
    assert len(pool.put(b"k", num_replicas=3).replicas) == 2
    pool.put(b"old", num_replicas=2)
    assert pool.refused(b"all", num_replicas=3, all_replicas=True) == "no_space"
    assert pool.has(b"k", b"old"), "nothing is evicted for what can never be"
    assert len(pool.put(b"two", num_replicas=2, all_replicas=True).replicas) == 2


def test_all_replicas_evict_what_is_in_the_way() -> None:
    pool = Pool("a", "b", granules=2)
    pool.put(b"1", 2, preferred=("a.dram",))
    grant = pool.put(b"2", 2, num_replicas=2, all_replicas=True)
    assert len(grant.replicas) == 2
    assert not pool.has(b"1")


def test_preferred_segments_come_first_then_the_emptiest() -> None:
    pool = Pool("a", "b", "c")
    pool.put(b"1", 5, preferred=("b.dram", "?"))
    assert pool.places(b"1") == ["b.dram"]
    pool.put(b"2", 5, preferred=("b.dram",))
    assert pool.places(b"2") == ["b.dram"]
    pool.put(b"3", preferred=("b.dram",))
    assert pool.places(b"3") != ["b.dram"], "it is full, so another one will do"
    pool.put(b"4", 3)
    assert pool.places(b"4") != pool.places(b"3")


def test_an_object_becomes_visible_without_replicas_that_could_not_be_written() -> None:
    pool = Pool("a", "b")
    grant = pool.start(b"k", num_replicas=2)
    assert pool.end(grant, "a.dram") is None
    assert pool.places(b"k") == ["b.dram"]
    assert pool.used == 2, "a write that failed by its time may still arrive"
    pool.wait(600)
    assert pool.used == 1


def test_an_object_of_which_nothing_could_be_written_is_refused() -> None:
    pool = Pool("a", "b")
    refusal = pool.end(pool.start(b"k", num_replicas=2), "a.dram", "b.dram")
    assert refusal is not None
    assert refusal.code == "stale_generation"
    assert not pool.has(b"k")
    pool.put(b"k")


def test_a_put_whose_node_is_gone_ends_with_what_is_left() -> None:
    pool = Pool("a", "b")
    both, one = pool.start(b"both", num_replicas=2), pool.start(b"one", preferred=("a.dram",))
    pool.unmount("a.dram")
    assert pool.end(both) is None
    assert pool.places(b"both") == ["b.dram"]
    refusal = pool.end(one)
    assert refusal is not None
    assert refusal.code == "stale_generation"


# room


def test_a_put_that_no_segment_could_hold_evicts_nothing() -> None:
    pool = Pool("a", granules=4)
    for key in (b"1", b"2", b"3"):
        pool.put(key)
    assert pool.refused(b"big", 5) == "no_space"
    assert pool.has(b"1", b"2", b"3")
    refusal = pool.try_start(b"big", 5)
    assert isinstance(refusal, m.Refusal)
    assert "no mounted segment could hold" in refusal.message


def test_a_put_on_an_empty_pool_says_so() -> None:
    assert Pool().refused(b"k") == "no_space"


@pytest.mark.parametrize(
    "wrong",
    [
        {"low_watermark": 0.99},
        {"put_discard_s": 700.0},
        {"ssd_high_watermark": 1.1},
        {"hot_max_part": -0.1},
        {"lease_s": 0.0},
        {"step_objects": 0},
    ],
)
def test_rules_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        PoolRules(**wrong)  # type: ignore[arg-type]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError):
        PoolState(PoolRules(eviction="?", max_objects=8), 1)
