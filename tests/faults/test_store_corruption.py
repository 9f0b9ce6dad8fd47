"""Flipped bits under load: in memory, on disk and on the wire. Nobody ever gets a wrong byte.

What was flipped where it lies is found by whoever reads it first, counted once, and that replica is never read again.
A bit that was flipped where nothing lives any more is not counted, and then that is shown.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from store_fleet import MIB, Fleet, open_fleet
from store_flips import FlippingProxy, NodeDisk, NodeMemory, flip_in_object
from store_load import check_ledgers, read_ledger
from store_nursery import Nursery, Role, open_nursery
from store_values import cut, value_of, version_in
from waiting import wait_until

from moonpool.base.errors import Corrupt, MoonpoolError, NotFound, StaleGeneration
from moonpool.store import Store
from moonpool.store.client import Put
from moonpool.store.messages import CopyObject, ObjectInfo, Placement, QueryTask

FIRST = 50_000  # numbers of what is flipped; the load has its own
NUM_VICTIMS = 40
MAX_NBYTES = 60_000


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with open_nursery() as made:
        yield made


def key_of(number: int) -> bytes:
    return b"victim-%d" % number


class Victims:
    """Objects that get flipped, and the ways to read them. Every read is checked."""

    def __init__(self, fleet: Fleet, client: Store, rng: random.Random) -> None:
        self.fleet, self.client, self.rng = fleet, client, rng
        self.reads: list[Callable[[int], None]] = [self.get, self.get_many_into, self.get_ranges, self.view, self.copy]

    def put(self, number: int) -> None:
        data = value_of(FIRST + number, 1, self.rng.randrange(100, MAX_NBYTES))
        (error,) = self.client.put_objects([Put(key_of(number), cut(data, self.rng.randint(1, 4)))])
        if error is not None:
            raise error

    def lookup(self, number: int) -> ObjectInfo | None:
        return self.client.lookup([key_of(number)])[0]

    @staticmethod
    def check(data: bytes | bytearray | memoryview, number: int) -> None:
        assert version_in(data, FIRST + number) == 1

    def get(self, number: int) -> None:
        data = self.client.get(key_of(number))
        if data is not None:
            self.check(data, number)

    def get_many_into(self, number: int) -> None:
        numbers = [number, *self.rng.sample(range(NUM_VICTIMS), 3)]
        buffers = [bytearray(MAX_NBYTES) for _ in numbers]
        got = self.client.get_many_into([key_of(each) for each in numbers], [[buffer] for buffer in buffers])
        for each, buffer, nbytes in zip(numbers, buffers, got, strict=True):
            if isinstance(nbytes, int):
                self.check(memoryview(buffer)[:nbytes], each)

    def get_ranges(self, number: int) -> None:
        size = self.client.size(key_of(number))
        if size is not None:
            at = self.rng.randrange(size)
            whole, part = bytearray(size), bytearray(self.rng.randint(1, size - at))
            if self.client.get_ranges(key_of(number), [(0, whole), (at, part)]) is not None:
                self.check(whole, number)
                assert part == whole[at : at + len(part)]

    def view(self, number: int) -> None:
        """Its bytes are verified when they are first seen; this client never remembers having seen any."""
        (view,) = self.client.view_many([key_of(number)])
        if not isinstance(view, MoonpoolError):
            with view:
                self.check(b"".join(view.pieces), number)

    def copy(self, number: int) -> None:
        """By order of the master, to the other node's memory. A damaged source is not copied."""
        try:
            task = self.fleet.ask(CopyObject(key=key_of(number), targets=("n1.dram",)))
        except MoonpoolError:
            return  # it is there already, or gone
        wait_until(lambda: self.fleet.ask(QueryTask(task_id=task)).state != "running", "the copy has ended")

    def read_this(self, info: ObjectInfo, place: Placement, number: int) -> None:
        """Insists on one replica, which was damaged. On disk it may have a successor at another place by then."""
        with pytest.raises((Corrupt, StaleGeneration, NotFound)):
            self._read_pieces(info, place)
        now = self.lookup(number)
        if now is None:
            assert "quarantined" in self.client.why(key_of(number))
        else:
            assert place not in now.replicas, "it is quarantined"

    def lies_elsewhere(self, place: Placement, number: int) -> bool:
        """Whether the log was tidied before the bit was flipped: the same record is at another place, and whole."""
        now = self.lookup(number)
        assert now is not None
        record = (place.segment, place.generation)
        moved = [each for each in now.replicas if (each.segment, each.generation) == record and each != place]
        for each in moved:
            self._read_pieces(now, each)
        return bool(moved)

    def _read_pieces(self, info: ObjectInfo, place: Placement) -> None:
        alone = ObjectInfo(info.key, info.nbytes, (place,), info.lease_s)
        session = self.client.piece_reads.open(alone, None)
        for index, nbytes in enumerate(session.fields.sizes):
            session.read_piece(index, bytearray(nbytes))
        session.finish()


def start_load(fleet: Fleet, number: int, rng: random.Random, **more: object) -> Role:
    load = fleet.actor(
        "load",
        ledger=str(fleet.folder / f"ledger-{number}"),
        client_number=number,
        num_clients=2,
        num_keys=12,
        max_nbytes=MAX_NBYTES,
        seed=rng.getrandbits(32),
        **more,
    )
    load.expect("ready")
    load.expect("paused")
    load.say("go")
    return load


def end_load(fleet: Fleet, loads: list[Role]) -> None:
    """Nobody has seen a wrong byte."""
    for number, load in enumerate(loads):
        load.say("pause")
        load.expect("paused")
        ledger = read_ledger(fleet.folder / f"ledger-{number}")
        check_ledgers([ledger])
        assert ledger.num_acknowledged > 0


def flip_where_it_lies(nursery: Nursery, seed: int, num_flips: int) -> None:
    rng = random.Random(seed)
    with open_fleet(nursery, lease_s=2.0, hot_hits=6, promote_after_hits=2) as fleet:
        memories: dict[str, NodeMemory | NodeDisk] = {}
        for name in ("n0", "n1"):
            node = fleet.start_node(name, dram_nbytes=48 * MIB, ssd_nbytes=256 * MIB, ssd_rest_s=2.5)
            memories[f"{name}.dram"] = NodeMemory(node.pid, f"{name}.dram")
            memories[f"{name}.ssd"] = NodeDisk(fleet.folder / f"{name}.ssd")
        fleet.wait_ok()
        victims = Victims(fleet, fleet.client(max_verified_views=0), rng)
        for number in range(NUM_VICTIMS):
            victims.put(number)
        loads = [start_load(fleet, number, rng) for number in range(2)]
        hits: dict[str, int] = dict.fromkeys(memories, 0)
        while sum(hits.values()) < num_flips:
            segment = flip_one(victims, memories)
            if segment is not None:
                hits[segment] += 1
        end_load(fleet, loads)
        assert min(hits["n0.dram"], hits["n0.ssd"], hits["n1.dram"]) > 0, hits
        counters = fleet.stats().counters
        assert counters["corrupt_replicas"] == num_flips
        assert (counters["evicted"], counters["evicted_ssd"], counters["lost"]) == (0, 0, 0), "nothing went by itself"
        wait_until(lambda: all_on_disk(fleet), "what was bad on disk is written there once more")
        fleet.check()


def all_on_disk(fleet: Fleet) -> bool:
    places = fleet.places(map(key_of, range(NUM_VICTIMS)))
    return all(any(each.segment.endswith(".ssd") for each in found) for found in places.values())


def flip_one(victims: Victims, memories: dict[str, NodeMemory | NodeDisk]) -> str | None:
    """Flips a bit of one replica, reads the object one way or another, and then that very replica. The segment, if the
    replica was one that lives: then it was counted, once.
    """
    number = victims.rng.randrange(NUM_VICTIMS)
    info = victims.lookup(number)
    if info is None:
        victims.put(number)
        return None
    if not any(each.segment.endswith(".ssd") for each in info.replicas):
        return None  # it is being written to disk: one bit that flips meanwhile may spoil both replicas
    place = victims.rng.choice(info.replicas)
    before = victims.fleet.counter("corrupt_replicas")
    if not flip_in_object(memories[place.segment], place, victims.rng):
        return None  # it has moved
    victims.rng.choice(victims.reads)(number)
    victims.read_this(info, place, number)
    num_found = victims.fleet.counter("corrupt_replicas") - before
    if num_found == 0:
        assert victims.lies_elsewhere(place, number), f"a flip at {place} was not counted"
        return None
    assert num_found == 1, f"a flip at {place} was counted {num_found} times"
    return place.segment


def test_bits_flip_where_objects_lie(nursery: Nursery) -> None:
    flip_where_it_lies(nursery, 1, 150)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_many_bits_flip_where_objects_lie(nursery: Nursery, seed: int) -> None:
    flip_where_it_lies(nursery, 100 + seed, 2500)


@pytest.mark.parametrize("round_trip", range(3))
def test_a_bit_flipped_before_the_object_is_offloaded(nursery: Nursery, round_trip: int) -> None:
    """Whoever finds it, the disk never gets the wrong byte as a good one."""
    with open_fleet(nursery) as fleet:
        node = fleet.start_node("n0", ssd_nbytes=64 * MIB)
        fleet.wait_ok()
        victims = Victims(fleet, fleet.client(), random.Random(round_trip))
        with closing(NodeMemory(node.pid, "n0.dram")) as memory:
            for number in range(20):
                victims.put(number)
                info = victims.lookup(number)
                assert info is not None
                flip_in_object(memory, info.replicas[0], victims.rng)
        for number in range(20):
            victims.get(number)
        wait_until(lambda: fleet.counter("corrupt_replicas") >= 20, "all of them are found")
        node.kill()
        fleet.start_node("n0")
        fleet.wait_ok()
        for number in range(20):
            victims.get(number)


def flip_on_the_wire(nursery: Nursery, seed: int, num_flips: int) -> None:
    """The client reaches the node through a proxy that spoils a frame now and then, in either direction."""
    rng = random.Random(seed)
    with open_fleet(nursery, put_discard_s=1.0, put_release_s=1.2, lease_s=0.5) as fleet:
        fleet.start_node("n0", dram_nbytes=64 * MIB, tcp_advertise_host="127.0.0.2")
        fleet.wait_ok()
        proxy = FlippingProxy("127.0.0.2", fleet.port_of("n0.dram"), "127.0.0.1", seed)
        with closing(proxy):
            client = fleet.client(shm=False, transfer_timeout_s=0.2)
            victims = Victims(fleet, client, rng)
            loads = [start_load(fleet, 0, rng), start_load(fleet, 1, rng, shm=False, transfer_timeout_s=0.2)]
            while proxy.num_flips < num_flips:
                number = rng.randrange(NUM_VICTIMS)
                proxy.arm(rng.choice(["there", "back"]))
                with contextlib.suppress(MoonpoolError):  # a clear error is as good as a miss
                    if not client.exist_many([key_of(number)])[0]:
                        victims.put(number)
                    else:
                        rng.choice([victims.get, victims.get_many_into, victims.get_ranges])(number)
            proxy.disarm()
            end_load(fleet, loads)
            fleet.wait_settled()
            victims.client = fleet.client(shm=False)
            for number in range(NUM_VICTIMS):  # as if nothing had been
                victims.client.remove_many([key_of(number)], force=True)
                victims.put(number)
                victims.get(number)


def test_bits_flip_on_the_wire(nursery: Nursery) -> None:
    flip_on_the_wire(nursery, 2, 40)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_bits_flip_on_the_wire(nursery: Nursery) -> None:
    flip_on_the_wire(nursery, 102, 2000)
