"""Space granted ahead: what it becomes, who gets it back, and what a restarted master knows of it."""

from __future__ import annotations

import pytest
from state_pool import SESSION, G, Pool

from moonpool.base.errors import AlreadyExists, InvalidInput, NotSettled, StaleGeneration
from moonpool.master.state.ahead import MAX_PART
from moonpool.store.messages import GrantAhead, Placement, PutAt, PutAtReply, PutOptions, ahead_key

GRANULES = 64  # of each node: four of them may be granted ahead


def grant(pool: Pool, count: int = 1, granules: int = 1, session: int = SESSION) -> list[tuple[int, Placement]]:
    pool.sessions |= {session} if session else set()
    reply = pool.state.grant_ahead(GrantAhead(granules * G, count, session=session), pool.now_s)
    pool.check()
    return [(generation, places[0]) for generation, places in zip(reply.generations, reply.replicas, strict=True)]


def put_at(pool: Pool, key: bytes, generation: int, nbytes: int = G, turn: int = 0, **options: object) -> PutAtReply:
    call = PutAt(key, generation, nbytes, PutOptions(**options), turn)  # type: ignore[arg-type]
    reply = pool.state.put_at(call, pool.now_s)
    pool.check()
    return reply


def code(reply: PutAtReply) -> str | None:
    return None if reply.refusal is None else reply.refusal.code


@pytest.fixture
def pool() -> Pool:
    return Pool("a", granules=GRANULES)


def used(pool: Pool) -> int:
    return pool.state.table_of_segments.used_nbytes // G


def test_space_becomes_an_object_by_one_call(pool: Pool) -> None:
    ((generation, place),) = grant(pool)
    assert pool.state.exist([b"k"], pool.now_s) == [False]
    assert [each.num_objects for each in pool.state.stats().segments] == [0], "space alone is no object"
    assert code(put_at(pool, b"k", generation, G - 7)) is None
    assert [each.num_objects for each in pool.state.stats().segments] == [1]
    (info,) = pool.state.lookup([b"k"], pool.now_s)
    assert info is not None
    assert (info.replicas, info.nbytes) == ((place,), G - 7)
    assert code(put_at(pool, b"k", generation, G - 7)) is None, "a repeated call"
    assert code(put_at(pool, b"other", generation)) == StaleGeneration.code
    assert pool.state.puts.ahead_nbytes == 0
    pool.state.remove([b"k"], True, pool.now_s)
    pool.now_s = 1000.0
    pool.state.tick(pool.now_s)
    pool.check()
    assert used(pool) == 0


def test_a_taken_key_keeps_its_value_and_the_space_is_used_for_another(pool: Pool) -> None:
    first, second = grant(pool, 2)
    assert code(put_at(pool, b"k", first[0])) is None
    assert code(put_at(pool, b"k", second[0])) == AlreadyExists.code
    (info,) = pool.state.lookup([b"k"], pool.now_s)
    assert info is not None
    assert info.replicas == (first[1],)
    pool.remove(b"k", force=True)
    pool.carry_out("a")
    assert code(put_at(pool, b"k", second[0])) == AlreadyExists.code, "a late copy of the call does nothing"
    assert pool.state.exist([b"k"], pool.now_s) == [False]
    assert code(put_at(pool, b"other", second[0], turn=1)) is None


def test_a_put_that_is_under_way_comes_first(pool: Pool) -> None:
    ((generation, _),) = grant(pool)
    begun = pool.start(b"k")
    assert code(put_at(pool, b"k", generation)) == AlreadyExists.code
    pool.end(begun)
    assert code(put_at(pool, b"k", generation, turn=1)) == AlreadyExists.code


def test_a_removed_key_is_settled_first(pool: Pool) -> None:
    ((generation, _),) = grant(pool)
    pool.put(b"k")
    pool.use(b"k")
    pool.remove(b"k", force=True)
    with pytest.raises(NotSettled):
        put_at(pool, b"k", generation)
    pool.carry_out("a")
    assert code(put_at(pool, b"k", generation)) is None


@pytest.mark.parametrize("bad", [{"nbytes": 2 * G}, {"nbytes": 0}, {"replace": True}, {"num_replicas": 2}])
def test_what_does_not_go_with_the_space_is_refused(pool: Pool, bad: dict[str, object]) -> None:
    ((generation, _),) = grant(pool)
    assert code(put_at(pool, b"k", generation, **bad)) == InvalidInput.code  # type: ignore[arg-type]
    assert code(put_at(pool, b"", generation)) == InvalidInput.code
    assert code(put_at(pool, b"k", generation)) is None


def test_it_is_bounded_and_not_granted_in_a_full_pool(pool: Pool) -> None:
    assert len(grant(pool, 64)) == int(GRANULES * MAX_PART)
    assert grant(pool) == []
    other = Pool("a", granules=GRANULES)
    (held, *_) = grant(other, 2)
    for number in range(GRANULES - 2):
        other.start(b"%d" % number)
    assert grant(other) == []
    assert not put_at(other, b"k", held[0]).may_hold


def test_space_of_a_process_that_ended_is_free(pool: Pool) -> None:
    grant(pool, 2)
    pool.state.sessions_gone([SESSION], pool.now_s)
    pool.check()
    assert (used(pool), pool.state.puts.ahead_nbytes) == (0, 0)


@pytest.mark.parametrize("how", ["running", "journal", "snapshot"])
def test_discarded_space_waits_for_its_process(pool: Pool, how: str) -> None:
    ((generation, _),) = grant(pool)
    # Another put of the process: it has no open put up to here, which says nothing about space that it only holds.
    pool.state.put_start([b"x"], [G], PutOptions(), 0.0, session=SESSION, settled_up_to=generation)
    pool.check()
    pool.now_s = 31.0
    pool.state.tick(pool.now_s)
    pool.check()
    if how == "snapshot":
        pool.snapshot()
    if how != "running":
        pool.restart()
    assert code(put_at(pool, b"k", generation)) == StaleGeneration.code


def test_discarded_space_is_not_reused_before_its_process_says_so(pool: Pool) -> None:
    ((generation, _),) = grant(pool)
    pool.state.put_start([b"x"], [G], PutOptions(), 0.0, session=SESSION, settled_up_to=generation)
    pool.now_s = 31.0
    pool.state.tick(pool.now_s)
    pool.state.put_start([b"y"], [G], PutOptions(), 31.0, session=SESSION, settled_up_to=generation + 1)
    assert code(put_at(pool, b"k", generation)) == StaleGeneration.code, "this may be a late copy: it says nothing"
    pool.now_s = 2000.0
    pool.state.tick(pool.now_s)
    pool.check()
    assert generation in pool.state.space.of_puts
    pool.state.put_revoke([ahead_key(generation)], [generation], True, pool.now_s)
    pool.check()
    assert generation not in pool.state.space.of_puts


def test_renewed_space_is_kept(pool: Pool) -> None:
    ((generation, _),) = grant(pool)
    for now_s in (20.0, 40.0, 60.0):
        pool.now_s = now_s
        assert pool.state.put_renew([ahead_key(generation)], [generation], now_s) == [True]
        pool.state.tick(now_s)
    assert code(put_at(pool, b"k", generation)) is None


@pytest.mark.parametrize("how", ["journal", "snapshot"])
def test_a_restarted_master_knows_what_is_held_and_what_became_of_it(pool: Pool, how: str) -> None:
    first, second, third = grant(pool, 3)
    assert code(put_at(pool, b"k", first[0], G - 9, hard_pin=True)) is None
    pool.state.put_revoke([ahead_key(third[0])], [third[0]], True, pool.now_s)
    pool.check()
    if how == "snapshot":
        pool.snapshot()
    pool.restart()
    pool.beat()
    assert pool.state.puts.ahead_nbytes == G
    (info,) = pool.state.lookup([b"k"], pool.now_s)
    assert info is not None
    assert (info.replicas, info.nbytes) == ((first[1],), G - 9)
    assert code(put_at(pool, b"k", first[0], G - 9)) is None
    assert code(put_at(pool, b"other", second[0])) is None
    assert code(put_at(pool, b"third", third[0])) == StaleGeneration.code
    assert used(pool) == 2


def test_space_of_a_node_that_is_gone_is_lost(pool: Pool) -> None:
    ((generation, _),) = grant(pool)
    pool.unmount("a.dram")
    assert code(put_at(pool, b"k", generation)) == StaleGeneration.code
    assert pool.state.exist([b"k"], pool.now_s) == [False]


def discard(pool: Pool) -> None:
    pool.now_s += 31.0
    pool.state.tick(pool.now_s)
    pool.check()


@pytest.mark.parametrize("how", ["running", "journal", "snapshot"])
def test_discarded_space_that_its_process_does_not_know_is_free(pool: Pool, how: str) -> None:
    lost, known = grant(pool, 2)
    discard(pool)
    if how == "snapshot":
        pool.snapshot()
    if how != "running":
        pool.restart()
        pool.beat()
    wanted = GrantAhead(G, 1, session=SESSION, known=(known[0],), known_up_to=lost[0] - 1)
    pool.state.grant_ahead(wanted, pool.now_s)
    assert lost[0] in pool.state.space.of_puts, "an old copy of the call says nothing about later grants"
    wanted = GrantAhead(G, 1, session=SESSION, known=(known[0],), known_up_to=known[0])
    pool.state.grant_ahead(wanted, pool.now_s)
    pool.check()
    assert set(pool.state.space.of_puts) == {known[0]}


@pytest.mark.parametrize("discarded", [False, True])
@pytest.mark.parametrize("how", ["running", "journal", "snapshot"])
def test_space_at_which_a_write_may_still_arrive_rests(pool: Pool, discarded: bool, how: str) -> None:
    ((generation, _),) = grant(pool)
    if discarded:
        discard(pool)
    pool.state.put_revoke([ahead_key(generation)], [generation], False, pool.now_s)
    pool.check()
    if how == "snapshot":
        pool.snapshot()
    if how != "running":
        pool.restart()
        pool.beat()
    pool.state.grant_ahead(GrantAhead(G, 1, session=SESSION, known_up_to=generation), pool.now_s)
    assert generation in pool.state.space.of_puts
    pool.now_s += 601.0
    pool.state.tick(pool.now_s)
    pool.check()
    assert generation not in pool.state.space.of_puts


def test_space_on_a_drained_segment_is_asked_back_at_renewals() -> None:
    pool = Pool("a", "b", granules=GRANULES)
    (generation, place), *_ = grant(pool)
    keys = [ahead_key(generation)]
    assert pool.state.put_renew(keys, [generation], pool.now_s) == [True]
    pool.state.drain(place.segment, pool.now_s)
    assert pool.state.put_renew(keys, [generation], pool.now_s) == [False]


def test_a_pool_that_is_short_of_space_asks_for_it_at_renewals(pool: Pool) -> None:
    (held, *_) = grant(pool, 2)
    begun = pool.start(b"x")
    for number in range(GRANULES - 3):
        pool.start(b"%d" % number)
    keys, generations = [ahead_key(held[0]), b"x"], [held[0], begun.generation]
    assert pool.state.put_renew(keys, generations, pool.now_s) == [False, True]
    assert code(put_at(pool, b"k", held[0])) is None, "it is not lost before it is given back"


def test_objects_with_such_keys_disturb_nothing(pool: Pool) -> None:
    ((generation, _),) = grant(pool)
    for replace in (False, True):
        reply = pool.state.put_start([ahead_key(generation)], [G], PutOptions(replace=replace), pool.now_s)
        assert reply.refusals[0].code == AlreadyExists.code
    assert pool.state.put_end([ahead_key(generation)], [generation], {}, pool.now_s)[0].code == StaleGeneration.code
    next_generation = pool.state.generations.last + 2
    pool.start(ahead_key(next_generation))
    assert grant(pool) == []
    pool.check()
    assert len(grant(pool)) == 1


def test_an_object_in_such_space_is_offloaded_as_any() -> None:
    pool = Pool("a", granules=GRANULES, ssd_granules=GRANULES)
    ((generation, _),) = grant(pool)
    assert code(put_at(pool, b"k", generation)) is None
    pool.carry_out("a")
    pool.check()
    (info,) = pool.state.lookup([b"k"], pool.now_s)
    assert info is not None
    assert {place.segment for place in info.replicas} == {"a.dram", "a.ssd"}
