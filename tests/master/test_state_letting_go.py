"""What a client has let go (`settled_up_to`) comes back by itself, even if nobody hears of that client again and the
master is restarted meanwhile.
"""

from __future__ import annotations

import pytest
from state_pool import SESSION, Grant, Pool

from moonpool.store import messages as m

MOMENTS = ["never", "at once", "after the discard", "after it was let go"]


@pytest.fixture(params=MOMENTS)
def moment(request: pytest.FixtureRequest) -> str:
    """When the master is restarted."""
    return str(request.param)


@pytest.fixture(params=["journal", "snapshot"])
def memory(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def perhaps_restart(pool: Pool, memory: str, now: bool) -> None:
    if now and memory == "snapshot":
        pool.snapshot()
    if now:
        pool.restart()


def say_settled(pool: Pool, up_to: int, *keys: bytes) -> None:
    """A put of other keys, which tells it and ends well, or is refused when there is none."""
    sizes, options = [1] * len(keys), m.PutOptions()
    reply = pool.state.put_start(keys, sizes, options, pool.now_s, session=SESSION, settled_up_to=up_to)
    pool.check()
    for key, generation, replicas in zip(keys, reply.generations, reply.replicas, strict=True):
        if replicas:
            assert pool.end(Grant(key, generation, replicas)) is None


def test_an_ended_put_that_was_let_go(moment: str, memory: str) -> None:
    pool = Pool("a", granules=4)
    lost = pool.start(b"lost", session=SESSION)
    perhaps_restart(pool, memory, moment == "at once")
    pool.tick(31)
    perhaps_restart(pool, memory, moment == "after the discard")
    assert pool.used == 1, "it is held for the process"
    say_settled(pool, lost.generation, b"other")
    perhaps_restart(pool, memory, moment == "after it was let go")
    assert pool.used == 2
    pool.tick(599)
    assert pool.used == 2, "bytes may still be on their way"
    pool.tick(2)
    assert pool.used == 1, "only the other one is there"


def test_a_put_under_way_that_was_let_go(moment: str, memory: str) -> None:
    """Its answer was lost, so nobody ends it."""
    pool = Pool("a", granules=4)
    lost = pool.start(b"lost", session=SESSION)
    perhaps_restart(pool, memory, moment == "at once")
    say_settled(pool, lost.generation, b"other")
    perhaps_restart(pool, memory, moment == "after it was let go")
    pool.tick(31)
    perhaps_restart(pool, memory, moment == "after the discard")
    assert pool.used == 2
    pool.tick(601)
    assert pool.used == 1


def test_it_is_told_by_a_put_that_is_refused(memory: str) -> None:
    pool = Pool("a", granules=2)
    pool.put(b"taken")
    lost = pool.start(b"lost", session=SESSION)
    pool.tick(31)
    say_settled(pool, lost.generation, b"taken")
    perhaps_restart(pool, memory, True)
    pool.tick(601)
    assert pool.used == 1


def test_what_is_in_hand_stays(memory: str) -> None:
    pool = Pool("a", granules=4)
    lost, mine = pool.start(b"lost", session=SESSION), pool.start(b"mine", session=SESSION)
    say_settled(pool, lost.generation, b"other")
    perhaps_restart(pool, memory, True)
    pool.tick(31)
    pool.tick(601)
    assert pool.used == 2, "the other one, and what may be written at this moment"
    pool.end(mine)
    assert pool.used == 1


def test_the_word_ends_with_the_session(memory: str) -> None:
    pool = Pool("a", granules=4)
    lost = pool.start(b"lost", session=SESSION)
    say_settled(pool, lost.generation, b"other")
    pool.sessions_gone(SESSION)
    perhaps_restart(pool, memory, True)
    assert pool.used == 1
    assert list(pool.state.space.stopped_sessions()) == []
