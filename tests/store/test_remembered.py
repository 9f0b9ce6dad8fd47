"""Reads that ask nobody: where objects were found is remembered, and no value is read that its key no longer has."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from facade_pool import FacadePool, facade_pool
from waiting import wait_until

from moonpool.base.clock import VirtualClock
from moonpool.base.errors import BreakerOpen
from moonpool.store import Store
from moonpool.store import messages as m
from moonpool.store.client.master_client import MasterClient
from moonpool.store.client.remembered import RememberedPlaces


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[FacadePool]:
    yield from facade_pool(tmp_path, journal_sync_s=0.0)  # what is answered is on disk, so it may be remembered


@pytest.fixture(params=["mapped", "tcp"])
def reader(pool: FacadePool, request: pytest.FixtureRequest) -> Store:
    return pool.store(shm=request.param == "mapped")


class Calls:
    """Counts what a client asks the master."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: list[str] = []
        original = store.master.call_noting_repeats

        def call(call: Any, *more: Any) -> Any:
            self.kinds.append(type(call).__name__)
            return original(call, *more)

        monkeypatch.setattr(store.master, "call_noting_repeats", call)


@pytest.fixture
def slow_disk_pool(tmp_path: Path) -> Iterator[FacadePool]:
    yield from facade_pool(tmp_path, journal_sync_s=3600.0)


def test_what_the_journal_may_still_lose_is_not_remembered(
    slow_disk_pool: FacadePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, master = slow_disk_pool.store(), slow_disk_pool.master.pool
    asked_for_sync = threading.Event()
    monkeypatch.setattr(master.state.outcomes.unsynced, "sync_soon", asked_for_sync.set)
    slow_disk_pool.store().put(b"k", b"1")
    asked = Calls(reader, monkeypatch)
    assert [reader.get(b"k") for _ in range(3)] == [b"1"] * 3
    assert asked.kinds.count("Lookup") == 3
    assert asked_for_sync.is_set()
    master.journal.sync()
    assert [reader.get(b"k") for _ in range(3)] == [b"1"] * 3
    assert asked.kinds.count("Lookup") == 4


def test_a_read_of_a_new_object_brings_its_record_to_the_disk(
    slow_disk_pool: FacadePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader, journal = slow_disk_pool.store(), slow_disk_pool.store(), slow_disk_pool.master.pool.journal
    for key in (b"1", b"2", b"3"):
        writer.put(key, b"v")
        assert reader.get(key) == b"v"
        wait_until(lambda: journal.num_synced == journal._num_appended, "all is synced")
        assert reader.get(key) == b"v"
        asked = Calls(reader, monkeypatch)
        assert reader.get(key) == b"v"
        assert "Lookup" not in asked.kinds


def test_what_was_found_is_read_without_asking(
    pool: FacadePool, reader: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = pool.store()
    writer.put_many({b"%d" % number: b"%d" % number * 1000 for number in range(20)})
    keys = [b"%d" % number for number in range(20)]
    assert reader.exist_many(keys) == [True] * 20
    asked = Calls(reader, monkeypatch)
    for key in keys:
        assert reader.get(key) == key * 1000
    assert reader.get_many(keys) == [key * 1000 for key in keys]
    assert reader.get_many([b"0", b"missing", b"1"]) == [b"0" * 1000, None, b"1" * 1000]
    assert asked.kinds == ["Lookup"], "for the key that nobody knew"
    assert reader.counters()["hits"] == 42


def test_the_first_read_after_an_exist_of_many_brings_the_places_of_its_neighbours(
    pool: FacadePool, reader: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [b"%03d" % number for number in range(150)]
    pool.store().put_many({key: key * 1000 for key in keys})
    assert reader.exist_many(keys) == [True] * 150
    reader.directory.refresh()
    asked = Calls(reader, monkeypatch)
    for key in reversed(keys):
        assert reader.get(key) == key * 1000
    assert asked.kinds == ["Locate"] * 3, "one for each group of 64 keys"
    pool.store().remove_many(keys[:1], force=True)
    assert reader.get(keys[0]) is None
    assert asked.kinds == ["Locate"] * 3 + ["Lookup"], "a group is asked for once"


def test_memory_of_this_machine_answers_whether_a_known_object_exists(
    pool: FacadePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = pool.store(), pool.store()
    writer.put("k", b"v" * 100)
    assert reader.exist("k")
    assert reader.exist("k")
    asked = Calls(reader, monkeypatch)
    assert reader.exist("k")
    assert asked.kinds == []
    remembered = reader._reads.remembered
    now_s = remembered.now_s
    monkeypatch.setattr(remembered, "now_s", lambda: now_s() + 6.0)
    assert reader.exist("k")
    assert asked.kinds == ["Locate"], "less than half of its lease was left"
    writer.put("k", b"w" * 100, replace=True)
    assert reader.exist("k")
    assert asked.kinds == ["Locate"] * 2, "its place was void"
    writer.remove("k", force=True)
    assert not reader.exist("k")


def test_an_exist_asks_for_no_place_that_is_remembered(pool: FacadePool, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = pool.store(), pool.store(shm=False)
    writer.put_many({b"1": b"v", b"2": b"v", b"3": b"v"})
    assert reader.exist_many([b"1", b"2"]) == [True, True]
    asked = Calls(reader, monkeypatch)
    assert reader.exist(b"1")
    assert reader.exist_many([b"2", b"1"]) == [True, True]
    assert asked.kinds == ["Exist"] * 2
    assert reader.exist_many([b"1", b"3"]) == [True, True]
    assert asked.kinds[2:] == ["Locate"]
    writer.remove(b"1", force=True)
    assert reader.exist_many([b"1", b"2"]) == [False, True]
    remembered = reader._reads.remembered
    now_s = remembered.now_s
    monkeypatch.setattr(remembered, "now_s", lambda: now_s() + 6.0)
    assert reader.exist(b"2")
    assert asked.kinds[3:] == ["Exist", "Locate"], "less than half of its lease was left"


def test_uses_are_reported_and_lease_the_objects_again(
    pool: FacadePool, reader: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.store().put("k", b"v")
    hits = reader.stats().counters["hits"]
    assert reader.get("k") == b"v"
    asked = Calls(reader, monkeypatch)
    monkeypatch.setattr("moonpool.store.client.remembered._REPORTED_USES", 1)
    for _ in range(10):
        assert reader.get("k") == b"v"
    assert asked.kinds == ["RenewLeases"] * 10
    assert reader.stats().counters["hits"] == hits + 11


def test_who_remembers_a_hot_object_finds_its_new_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moonpool.store.client.remembered._REPORTED_USES", 1)
    pool = FacadePool(tmp_path, num_nodes=2, hot_hits=4, journal_sync_s=0.0)
    try:
        pool.store().put("k", b"v")
        reader = pool.store()
        assert reader.get("k") == b"v"
        asked = Calls(reader, monkeypatch)
        for _ in range(3):
            assert reader.get("k") == b"v"

        def is_copied() -> bool:
            (info,) = pool.on_loop(lambda: pool.master.state.locate([b"k"], pool.clock.now_s()))
            return info is not None and len(info.replicas) == 2

        wait_until(is_copied, "it is copied")
        assert asked.kinds == ["RenewLeases"] * 3
        for _ in range(3):
            assert reader.get("k") == b"v"
        assert asked.kinds[3:] == ["RenewLeases", "Lookup", "RenewLeases"], (
            "it learns that there is more, and looks once"
        )
    finally:
        pool.close()


@pytest.mark.parametrize("how", ["remove", "upsert", "remove and put", "remove matching"])
def test_no_value_is_read_that_its_key_no_longer_has(pool: FacadePool, reader: Store, how: str) -> None:
    writer = pool.store()
    for turn in range(20):
        old, new = b"old %d" % turn, b"new %d" % turn
        writer.upsert("k", old)
        assert reader.get("k") == old
        if how == "upsert":
            writer.upsert("k", new)
        elif how == "remove matching":
            assert writer.remove_matching("^k$", force=True) == (1, 0)
        else:
            assert writer.remove("k", force=True)
        if how == "remove and put":
            assert writer.put("k", new)
        assert reader.get("k") == (None if how in ("remove", "remove matching") else new)


@pytest.fixture
def short_turns() -> Iterator[None]:
    """Threads that read mapped memory keep Python's lock for a whole turn, and a call of the writer takes many."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 50)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("short_turns")
def test_threads_read_current_values_while_they_change(pool: FacadePool, reader: Store) -> None:
    writer, latest, wrong = pool.store(), [0], list[bytes | None]()
    writer.upsert("k", b"%06d" % 0 * 500)
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            at_least = latest[0]
            value = reader.get("k")
            if value is None or value != value[:6] * 500 or int(value[:6]) < at_least:
                wrong.append(value)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    for version in range(1, 100):
        writer.upsert("k", b"%06d" % version * 500)
        latest[0] = version
    done.set()
    for thread in readers:
        thread.join()
    assert not wrong


def test_headers_without_room_for_a_mark_are_not_read_unasked(pool: FacadePool, reader: Store) -> None:
    writer = pool.store()
    for turn in range(3):
        value = [b"%d" % turn] * 400  # 400 pieces: the header fills more than a page
        writer.upsert("k", value)
        for _ in range(2):
            assert reader.get("k") == b"".join(value)


# what is remembered, and for how long


class FakeMaster:
    def __init__(self) -> None:
        self.reports: list[m.RenewLeases] = []
        self.there = True
        self.is_away = False

    def call(self, call: m.RenewLeases) -> m.RenewedLeases:
        if self.is_away:
            raise BreakerOpen("away")
        self.reports.append(call)
        return m.RenewedLeases([self.there] * len(call.keys), 10.0)


def found(key: bytes, *segments: str, remember_s: float = 10.0, generation: int = 1) -> m.ObjectInfo:
    places = tuple(m.Placement(segment, 0, 1, generation) for segment in segments or ("dram",))
    return m.ObjectInfo(key, 100, places, 10.0, remember_s)


def places(clock: VirtualClock, master: FakeMaster, max_objects: int = 100) -> RememberedPlaces:
    def is_memory(place: m.Placement) -> bool:
        return place.segment != "ssd"

    return RememberedPlaces(cast("MasterClient", master), is_memory, max_objects=max_objects, clock=clock)


def test_the_time_counts_from_the_question_and_to_the_end_of_the_read() -> None:
    clock = VirtualClock()
    remembered = places(clock, FakeMaster())
    clock.advance(3.0)
    remembered.add([found(b"k")], asked_s=1.0)
    (info,) = remembered.find([b"k"], 10.9)
    assert info is not None
    assert remembered.is_valid(info, 10.9)
    assert not remembered.is_valid(info, 11.0), "the process stood still while it read"
    assert remembered.find([b"k"], 11.0) == [None]


def test_disks_are_not_remembered_nor_what_may_not_be() -> None:
    remembered = places(VirtualClock(), FakeMaster())
    remembered.add([found(b"disk", "ssd"), found(b"no", remember_s=0.0), None, found(b"both", "dram", "ssd")], 0.0)
    disk, no, both = remembered.find([b"disk", b"no", b"both"], 0.0)
    assert (disk, no) == (None, None)
    assert both is not None
    assert [place.segment for place in both.replicas] == ["dram"]


def test_the_oldest_are_forgotten_first() -> None:
    remembered = places(VirtualClock(), FakeMaster(), max_objects=10)
    for number in range(15):
        remembered.add([found(b"%d" % number)], 0.0)
    there = remembered.find([b"%d" % number for number in range(15)], 1.0)
    assert [each is not None for each in there] == [False] * 5 + [True] * 10


def test_a_report_renews_what_is_still_there() -> None:
    clock, master = VirtualClock(), FakeMaster()
    remembered = places(clock, master)
    remembered.add([found(b"k")], 0.0)
    (info,) = remembered.find([b"k"], 0.0)
    assert info is not None
    remembered.used([info])
    assert master.reports == [], "one use is not worth a call"
    clock.advance(3.0)
    remembered.used([info])
    assert [call.keys for call in master.reports] == [[b"k"]]
    assert remembered.find([b"k"], 12.9) == [info], "until 10 s after the report"
    master.is_away = True
    clock.advance(3.0)
    remembered.used([info])
    clock.advance(3.0)
    remembered.used([info])
    assert remembered.find([b"k"], 12.9) == [info], "a master that is away renews nothing, and the reads have succeeded"
    master.is_away, master.there = False, False
    remembered.used([info])
    clock.advance(3.0)
    remembered.used([info])
    assert remembered.find([b"k"], clock.now_s()) == [None]


def test_uses_are_reported_at_the_end() -> None:
    master = FakeMaster()
    remembered = places(VirtualClock(), master)
    remembered.add([found(b"k")], 0.0)
    (info,) = remembered.find([b"k"], 0.0)
    assert info is not None
    remembered.used([info])
    remembered.close()
    remembered.close()
    assert [call.keys for call in master.reports] == [[b"k"]]
