"""Processes stopped (SIGSTOP) in the middle of a read, a view or a put, for longer than any promise lasts.

A copy is a miss then, never other bytes. A view's bytes stay, and so does space that is being written in place: nobody
else gets either while the process lives, and everybody does as soon as it is dead. Bytes sent over tcp are refused.
All of it also when the master is killed and started again meanwhile.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from store_fleet import MIB, Fleet, fill, open_fleet, overlap
from store_late_roles import FIRST_VERSION
from store_load import KEYS_EACH, check_ledgers, read_ledger, wait_acknowledged
from store_nursery import Nursery, Role, open_nursery
from store_values import value_of, version_in
from waiting import wait_until

from moonpool.store import Store

KEY, NUMBER = b"late", 7
NBYTES = 200_000
DRAM_NBYTES = 2 * MIB

restarts_master = pytest.mark.parametrize("restart", [False, True], ids=["", "master restarts"])


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with open_nursery() as made:
        yield made


@pytest.fixture
def fleet(nursery: Nursery) -> Iterator[Fleet]:
    with open_fleet(nursery) as made:
        made.start_node("n0", dram_nbytes=DRAM_NBYTES)
        made.wait_ok()
        yield made


@pytest.fixture
def client(fleet: Fleet) -> Store:
    return fleet.client()


def put_first(client: Store) -> None:
    assert client.put(KEY, value_of(NUMBER, FIRST_VERSION, NBYTES))


def wait_late(fleet: Fleet, restart: bool) -> None:
    """Until every promise that ends by itself has ended."""
    if restart:
        fleet.restart_master()
    fleet.pass_time()
    wait_until(lambda: not fleet.check().on_its_way["put"], "puts are given up")
    fleet.pass_time()


def fill_up(client: Store, prefix: bytes = b"new") -> list[bytes]:
    """Takes all the space there is for objects of this size."""
    return fill(client, prefix, lambda at: value_of(at, 2, NBYTES))


def check_filled(client: Store, keys: list[bytes]) -> None:
    for at, key in enumerate(keys):
        data = client.get(key)
        assert data is not None
        assert version_in(data, at) == 2


def gone_and_reused(fleet: Fleet, client: Store, force: bool = True) -> list[bytes]:
    """Removes the object by force, or leaves it to eviction, and fills the pool; the new keys."""
    was = fleet.spans([KEY])
    if force:
        assert client.remove_many([KEY], force=True) == [True]
    keys = fill_up(client)
    assert fleet.places([KEY]) == {}
    assert overlap(was, fleet.spans(keys)), "the space is used again, else this test shows nothing"
    return keys


# copies

SHM_POINTS = ["moonpool.store.client.mapped_copy:_new_bytes", "moonpool.store.client.mapped_copy:are_right"]
TCP_POINTS = [
    "moonpool.store.client.remote_read:RemoteRead._read_one",
    "moonpool.transfer.transports.tcp.transport:TcpRemote.read_unchanged",
]
COPIES = [(True, where) for where in SHM_POINTS] + [(False, where) for where in TCP_POINTS]


@pytest.mark.parametrize(("shm", "where"), COPIES, ids=lambda each: str(each).rpartition(":")[2])
@pytest.mark.parametrize("force", [True, False], ids=["removed", "evicted"])
def test_a_late_copy_is_a_miss(fleet: Fleet, client: Store, shm: bool, where: str, force: bool) -> None:
    put_first(client)
    reader = fleet.actor("late_copy", key=KEY.decode(), number=NUMBER, shm=shm, where=where)
    reader.expect("asking")
    reader.wait_stopped()
    wait_late(fleet, restart=False)
    keys = gone_and_reused(fleet, client, force)
    reader.resume()
    reader.expect("miss")
    check_filled(client, keys)
    assert fleet.counter("corrupt_replicas") == 0, "late is not corrupt"


def test_a_copy_whose_verdict_came_in_time_is_right(fleet: Fleet, client: Store) -> None:
    """Over tcp the node has said that the space was the object's until the last byte was taken."""
    put_first(client)
    where = "moonpool.store.client.remote_read:RemoteObject.check"
    reader = fleet.actor("late_copy", key=KEY.decode(), number=NUMBER, shm=False, where=where)
    reader.expect("asking")
    reader.wait_stopped()
    wait_late(fleet, restart=False)
    gone_and_reused(fleet, client, True)
    reader.resume()
    reader.expect("right")


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
def test_a_late_copy_after_the_masters_restart(fleet: Fleet, client: Store, shm: bool) -> None:
    put_first(client)
    where = SHM_POINTS[0] if shm else TCP_POINTS[0]
    reader = fleet.actor("late_copy", key=KEY.decode(), number=NUMBER, shm=shm, where=where)
    reader.expect("asking")
    reader.wait_stopped()
    wait_late(fleet, restart=True)
    keys = gone_and_reused(fleet, client)
    reader.resume()
    reader.expect("miss")
    check_filled(client, keys)


# views


def start_viewer(fleet: Fleet) -> Role:
    viewer = fleet.actor("late_view", key=KEY.decode(), number=NUMBER)
    viewer.expect("asking")
    viewer.wait_stopped()
    return viewer


@restarts_master
def test_a_late_view_keeps_its_bytes(fleet: Fleet, client: Store, restart: bool) -> None:
    put_first(client)
    was = fleet.spans([KEY])
    viewer = start_viewer(fleet)
    wait_late(fleet, restart)
    keys = fill_up(client)
    assert fleet.spans([KEY]) == was, "a view keeps its object from eviction"
    assert client.remove_many([KEY]) == [False]
    assert client.remove_many([KEY], force=True) == [True]
    wait_late(fleet, restart)
    assert fill_up(client, b"more") == [], "the space is the viewer's"
    assert fleet.check().homeless == was
    viewer.resume()
    viewer.expect("right")
    check_filled(client, keys)
    viewer.say("close")
    viewer.expect("closed")
    fleet.wait_settled()
    wait_until(lambda: fleet.check().homeless == [], "the space is free")
    assert client.put(b"last", value_of(1, 1, NBYTES))


@restarts_master
def test_a_dead_viewer_keeps_nothing(fleet: Fleet, client: Store, restart: bool) -> None:
    put_first(client)
    viewer = start_viewer(fleet)
    assert client.remove_many([KEY], force=True) == [True]
    if restart:  # it dies while nobody can be told
        assert fleet.master is not None
        fleet.master.kill()
        viewer.kill()
        fleet.start_master()
        fleet.wait_ok()
    else:
        viewer.kill()
    fleet.pass_time()  # of a look-up's lease
    wait_until(lambda: fleet.check().homeless == [], "the space is free")
    keys = fill_up(client)
    assert len(keys) == DRAM_NBYTES // (NBYTES + 4096)
    check_filled(client, keys)


def test_a_view_closed_while_the_master_dies_is_let_go(fleet: Fleet, client: Store) -> None:
    put_first(client)
    (view,) = client.view_many([KEY])
    assert fleet.master is not None
    fleet.master.stop()
    view.close()  # type: ignore[union-attr]
    time.sleep(0.1)  # it is said, and nobody hears
    fleet.restart_master()
    wait_until(lambda: fleet.check().num_pins == 0, "the pin is over")


# puts


def start_writer(fleet: Fleet, shm: bool) -> Role:
    """A process that has written half of its bytes, and where."""
    writer = fleet.actor("late_put", key=KEY.decode(), number=NUMBER, nbytes=NBYTES, shm=shm)
    writer.expect("asking")
    writer.wait_stopped()
    return writer


@restarts_master
def test_a_late_put_in_place_has_its_space(fleet: Fleet, client: Store, restart: bool) -> None:
    writer = start_writer(fleet, shm=True)
    granted = fleet.check().homeless
    assert len(granted) == 1
    wait_late(fleet, restart)
    assert client.put(KEY, value_of(NUMBER, 3, NBYTES), pinned=True), "its key is free"
    keys = fill_up(client)
    assert keys
    assert fleet.check().homeless == granted
    assert not overlap(granted, fleet.spans([KEY, *keys]))
    writer.resume()
    writer.expect("refused stale_generation")
    wait_until(lambda: fleet.check().homeless == [], "the writer has said that it stopped")
    assert client.put(b"last", value_of(1, 1, NBYTES), pinned=True)
    check_filled(client, keys)
    data = client.get(KEY)
    assert data is not None
    assert version_in(data, NUMBER) == 3


@restarts_master
def test_a_dead_writer_keeps_nothing(fleet: Fleet, client: Store, restart: bool) -> None:
    writer = start_writer(fleet, shm=True)
    if restart:
        assert fleet.master is not None
        fleet.master.kill()
        writer.kill()
        fleet.start_master()
        fleet.wait_ok()
    else:
        writer.kill()
    wait_until(lambda: fleet.check().homeless == [], "the space is free")
    assert client.put(KEY, value_of(NUMBER, 3, NBYTES)), "its key is free"


@restarts_master
def test_a_late_put_over_tcp_is_refused(fleet: Fleet, client: Store, restart: bool) -> None:
    writer = start_writer(fleet, shm=False)
    granted = fleet.check().homeless
    assert len(granted) == 1
    wait_late(fleet, restart)
    fleet.wait_settled()
    keys = fill_up(client)
    assert overlap(granted, fleet.spans(keys)), "the space is used again, else this test shows nothing"
    writer.resume()
    writer.expect("refused stale_generation")
    check_filled(client, keys)


def test_an_upsert_does_not_wait_for_a_late_writer(fleet: Fleet, client: Store) -> None:
    put_first(client)
    client.remove_many([KEY], force=True)
    writer = start_writer(fleet, shm=True)
    granted = fleet.check().homeless
    assert client.put(KEY, value_of(NUMBER, 3, NBYTES), replace=True)
    assert not overlap(granted, fleet.spans([KEY]))
    writer.resume()
    writer.expect("refused stale_generation")
    data = client.get(KEY)
    assert data is not None
    assert version_in(data, NUMBER) == 3


# nodes


@pytest.mark.parametrize("holder", ["view", "put"])
def test_a_node_stopped_for_too_long_takes_nothing_from_those_who_hold_its_memory(
    nursery: Nursery, holder: str
) -> None:
    """The master gives it up and takes it back, empty; but a view is still looked at, and a put still being written."""
    with open_fleet(nursery) as fleet:
        node = fleet.start_node("n0", dram_nbytes=DRAM_NBYTES)
        fleet.wait_ok()
        client = fleet.client()
        if holder == "view":
            put_first(client)
            late = start_viewer(fleet)
        else:
            late = start_writer(fleet, shm=True)
        node.stop()
        fleet.pass_time(fleet.rules["segment_ttl_s"] + 1.0)
        wait_until(lambda: not fleet.stats().segments, "the node is given up")
        node.resume()
        fleet.wait_ok()
        keys = fill_up(client)
        assert keys
        late.resume()
        assert late.hear().startswith("right" if holder == "view" else "refused ")
        check_filled(client, keys)
        assert fleet.counter("corrupt_replicas") == 0


# all of it at random


def stop_at_random(nursery: Nursery, seed: int, num_stops: int) -> None:
    """Under load, in a pool that is too small: leases run out, puts are discarded, space is used again."""
    rng = random.Random(seed)
    times: dict[str, Any] = {"lease_s": 0.05, "put_discard_s": 0.15, "put_release_s": 0.25}
    with open_fleet(nursery, **times) as fleet:
        fleet.start_node("n0", dram_nbytes=1 * MIB)
        fleet.wait_ok()
        loads = [start_load(fleet, number, rng) for number in range(3)]
        ledger_paths = [fleet.folder / f"ledger-{number}" for number in range(3)]
        for load in loads:
            load.say("go")
        for _ in range(num_stops):
            wait_acknowledged(ledger_paths, rng.randint(11, 30))  # any moment will do
            stopped = rng.sample(loads, rng.randint(1, 2))
            for load in stopped:
                load.stop()
            time.sleep(rng.uniform(0.1, 0.4))
            for load in stopped:
                load.resume()
        for load in loads:
            load.say("pause")
            load.expect("paused")
        fleet.wait_settled()
        ledgers = [read_ledger(path) for path in ledger_paths]
        check_ledgers(ledgers)
        assert sum(ledger.num_acknowledged for ledger in ledgers) > 10 * num_stops
        assert fleet.counter("evicted") > 0
        assert fleet.counter("corrupt_replicas") == 0


def start_load(fleet: Fleet, number: int, rng: random.Random) -> Role:
    assert number < KEYS_EACH
    load = fleet.actor(
        "load",
        ledger=str(fleet.folder / f"ledger-{number}"),
        client_number=number,
        num_clients=3,
        num_keys=12,
        max_nbytes=60_000,
        seed=rng.getrandbits(32),
        shm=number < 2,
    )
    load.expect("ready")
    load.expect("paused")
    return load


def test_stops_at_random(nursery: Nursery) -> None:
    stop_at_random(nursery, 1, 12)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_many_stops_at_random(nursery: Nursery, seed: int) -> None:
    stop_at_random(nursery, 100 + seed, 250)
