"""What the answer to a PutStart had granted is free as soon as its client has given that answer up."""

from __future__ import annotations

from typing import Any

import pytest
from state_pool import SESSION, G, Pool, descriptor

from moonpool.base.errors import Cancelled
from moonpool.master.state import unfinished_puts
from moonpool.store import messages as m
from moonpool.store.messages.values import MAX_REPLICAS

NUMBER = 2**62 + 5
MIB = 1024 * 1024


def start(pool: Pool, number: int, *keys: bytes, session: int = SESSION, **options: Any) -> m.PutReply:
    sizes = [options.pop("nbytes", G)] * len(keys)
    pool.sessions |= {session} if session else set()
    reply = pool.state.put_start(keys, sizes, m.PutOptions(**options), pool.now_s, session=session, number=number)
    pool.check()
    return reply


def drop(pool: Pool, number: int, *keys: bytes) -> None:
    pool.state.put_drop(number, keys, pool.now_s)
    pool.check()


def unanswered(pool: Pool) -> int:
    return pool.state.stats().counters["unanswered"]


@pytest.fixture(params=[SESSION, 0], ids=["in place", "over a network"])
def session(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=["no restart", "journal", "snapshot"])
def restart(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def perhaps_restart(pool: Pool, restart: str) -> None:
    if restart == "snapshot":
        pool.snapshot()
    if restart != "no restart":
        pool.restart()


def test_an_unfinished_put_is_over_at_once(session: int, restart: str) -> None:
    pool = Pool("a", granules=4)
    start(pool, NUMBER, b"k", b"l", session=session)
    perhaps_restart(pool, restart)
    drop(pool, NUMBER, b"k", b"l")
    assert pool.used == 0
    assert pool.now_s == 0, "no time has passed"
    assert unanswered(pool) == 2
    perhaps_restart(pool, restart)
    assert pool.used == 0
    pool.put(b"k", session=session)
    assert pool.has(b"k")


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_put_that_was_discarded_since_is_free_at_once(session: int, restart: str, moment: str) -> None:
    """The client was away for longer than the master waits: its key was free, its space not."""
    pool = Pool("a", granules=4)
    start(pool, NUMBER, b"k", b"l", session=session)
    if moment == "before":
        perhaps_restart(pool, restart)
    pool.tick(31)
    if moment == "after":
        perhaps_restart(pool, restart)
    assert pool.used == 2
    drop(pool, NUMBER, b"k", b"l")
    assert pool.used == 0
    assert unanswered(pool) == 2
    perhaps_restart(pool, restart)
    assert pool.used == 0
    pool.tick(1000)
    assert pool.used == 0, "nothing is freed twice"


def test_only_the_puts_of_that_call_end(session: int) -> None:
    pool = Pool("a", granules=8)
    start(pool, NUMBER, b"k", session=session)
    other = start(pool, NUMBER + 1, b"l", session=session)
    own = start(pool, NUMBER + 2, b"k", session=session, replace=True)  # takes the key over
    for number in (NUMBER, NUMBER, 0, NUMBER + 9):
        drop(pool, number, b"k", b"l", b"k", b"never asked for")
    assert pool.used == 2
    assert unanswered(pool) == 1
    for key, reply in ((b"l", other), (b"k", own)):
        assert pool.state.put_end([key], reply.generations, {}, pool.now_s) == {}
    drop(pool, NUMBER + 2, b"k")
    assert pool.has(b"k", b"l"), "an object is no unfinished put"
    drop(pool, NUMBER, b"k")
    assert pool.used == 2


def test_an_upsert_that_is_dropped_leaves_the_old_value(session: int) -> None:
    pool = Pool("a", granules=8)
    before = pool.put(b"k")
    start(pool, NUMBER, b"k", session=session, replace=True)
    drop(pool, NUMBER, b"k")
    found = pool.find(b"k")
    assert found is not None
    assert found.replicas == before.replicas
    assert pool.used == 1


def test_all_replicas_are_free() -> None:
    pool = Pool(*"abc", granules=4)
    start(pool, NUMBER, b"k", num_replicas=3)
    assert pool.used == 3
    drop(pool, NUMBER, b"k")
    assert pool.used == 0
    assert MAX_REPLICAS >= 3


def test_a_call_that_comes_after_it_was_given_up_is_refused(session: int) -> None:
    """It was on its way over a connection that the client had left for another one."""
    pool = Pool("a", granules=4)
    drop(pool, NUMBER, b"k")
    with pytest.raises(Cancelled):
        start(pool, NUMBER, b"k", session=session)
    assert pool.used == 0
    start(pool, NUMBER + 1, b"k", session=session)
    assert pool.used == 1, "the next one is another call"
    drop(pool, NUMBER, b"k")
    assert pool.used == 1


def test_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished_puts, "MAX_DROPPED", 3)
    pool = Pool("a", granules=8)
    for number in range(1, 5):
        drop(pool, number, b"k")
    assert [pool.state.puts.is_dropped(number) for number in range(1, 5)] == [False, True, True, True]


def test_256_mib_of_lost_answers_leave_the_pool_as_it_was(session: int) -> None:
    pool = Pool()
    pool.state.mount("a", descriptor("a.dram", 384 * MIB // G), pool.now_s, registry_address="unix:/a")
    pool.state.heartbeat("a.dram", 1, pool.now_s)
    pool.incarnations["a.dram"] = 1
    pool.put(b"mine", 10)
    free = free_ranges(pool)
    for burst in range(3):
        keys = [b"%d-%d" % (burst, at) for at in range(256)]
        for at in range(0, 256, 32):
            reply = start(pool, NUMBER + 256 * burst + at, *keys[at : at + 32], session=session, nbytes=MIB)
            assert not reply.refusals
        assert pool.used == 10 + 256 * MIB // G
        for at in range(0, 256, 32):
            drop(pool, NUMBER + 256 * burst + at, *keys[at : at + 32])
        assert free_ranges(pool) == free
    assert not pool.state.space.of_puts


def free_ranges(pool: Pool) -> list[tuple[int, int]]:
    (segment,) = pool.state.table_of_segments.all()
    assert segment.allocator is not None
    return segment.allocator.free_ranges()
