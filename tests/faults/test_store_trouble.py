"""No space, no disk, no file handles, no master: clear errors or misses while it lasts, and all is well afterwards."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_disk import remount, small_disk
from store_fleet import MIB, Fleet, open_fleet
from store_load import check_ledgers, read_ledger
from store_nursery import Nursery, Role, open_nursery
from store_values import value_of, version_in
from waiting import HANG_S, wait_until

from moonpool.base.errors import MoonpoolError, NoSpace, Unavailable
from moonpool.store import Store
from moonpool.store.client import Put, ahead

NBYTES = 100_000


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with open_nursery() as made:
        yield made


def fill_disk(folder: Path) -> Path:
    """Takes all that is left; the file to remove when it should be over."""
    hog = folder / "hog"
    with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return hog


@contextmanager
def limited(role: Role, which: int, soft: int) -> Iterator[None]:
    """The process cannot have more than that for a while."""
    before = resource.prlimit(role.pid, which)
    resource.prlimit(role.pid, which, (soft, before[1]))
    try:
        yield
    finally:
        resource.prlimit(role.pid, which, before)


def no_handles(role: Role) -> contextlib.AbstractContextManager[None]:
    """It cannot open anything more."""
    used = {int(name) for name in os.listdir(f"/proc/{role.pid}/fd")}
    lowest_free = next(number for number in range(len(used) + 1) if number not in used)
    return limited(role, resource.RLIMIT_NOFILE, lowest_free)


def put(client: Store, number: int, **options: Any) -> bool:
    return client.put(b"key-%d" % number, value_of(number, 1, NBYTES), **options)


def put_all(client: Store, numbers: Iterable[int]) -> None:
    for number in numbers:
        put(client, number)


def has(client: Store, number: int) -> bool:
    data = client.get(b"key-%d" % number)
    assert data is None or version_in(data, number) == 1
    return data is not None


def has_all(client: Store, numbers: Iterable[int]) -> bool:
    return works(lambda: all(has(client, number) for number in numbers))


def works(action: Callable[[], bool]) -> bool:
    try:
        return action()
    except MoonpoolError:
        return False


# a full pool


@pytest.mark.parametrize("kept_by", ["lease", "pin", "view", "hard pin"])
def test_a_pool_that_is_all_in_use(nursery: Nursery, kept_by: str) -> None:
    with open_fleet(nursery) as fleet:
        fleet.start_node("n0", dram_nbytes=1 * MIB)
        client = fleet.client()
        numbers = range(9)
        keys = [b"key-%d" % number for number in numbers]
        for number in numbers:
            assert put(client, number, pinned=kept_by == "hard pin")
        views: list[Any] = client.view_many(keys) if kept_by == "view" else []
        if kept_by == "pin":
            assert client.pin_many(keys) == [True] * 9
        assert client.exist_many(keys) == [True] * 9
        if kept_by != "lease":
            fleet.pass_time()
        with pytest.raises(NoSpace, match="leased, pinned or being written"):
            put_all(client, range(100, 110))
        for view, number in zip(views, numbers, strict=False):
            assert version_in(view.pieces[0], number) == 1
            view.close()
        views.clear()
        if kept_by == "pin":
            client.unpin_many(keys)
        if kept_by == "hard pin":
            client.remove_many(keys, force=True)
        fleet.pass_time()
        wait_until(lambda: works(lambda: put(client, 200)), "there is room again")
        assert has(client, 200)
        fleet.check()


# disks


@pytest.mark.parametrize("how", ["full", "limit"])
def test_a_log_that_cannot_grow(nursery: Nursery, how: str) -> None:
    """What cannot be offloaded stays in memory, and is offloaded when that has passed."""
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(open_fleet(nursery))
        if how == "full":
            disk = stack.enter_context(small_disk(fleet.folder / "n0.ssd", 24 * MIB))
        node = fleet.start_node("n0", ssd_nbytes=20 * MIB)
        fleet.wait_ok()
        if how == "full":
            hog = fill_disk(disk)
        client = fleet.client()
        with limited(node, resource.RLIMIT_FSIZE, 0) if how == "limit" else contextlib.nullcontext():
            for number in range(20):
                assert put(client, number)
            wait_until(lambda: fleet.counter("offload_failures") > 0, "the disk refused")
            assert fleet.counter("offloaded") == 0
            assert all(has(client, number) for number in range(20))
            if how == "full":
                hog.unlink()
        wait_until(lambda: fleet.counter("offloaded") >= 20, "all are offloaded, the early ones too")
        node.kill()
        fleet.start_node("n0")
        fleet.wait_ok()
        assert all(has(client, number) for number in range(20))
        fleet.check()
        fleet.close()


def test_a_log_on_a_read_only_disk(nursery: Nursery) -> None:
    """Its node goes on without; what is there is away until it can be written again."""
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(open_fleet(nursery))
        disk = stack.enter_context(small_disk(fleet.folder / "n0.ssd", 64 * MIB))
        node = fleet.start_node("n0", ssd_nbytes=32 * MIB)
        fleet.wait_ok()
        client = fleet.client()
        for number in range(10):
            assert put(client, number)
        wait_until(lambda: fleet.counter("offloaded") == 10, "they are on disk")
        node.kill()
        # The kernel may still hold the files of a process that was killed while it wrote.
        wait_until(lambda: remount(disk, "ro"), "the disk is read-only")
        try:
            fleet.start_node("n0")
            for number in range(10, 20):
                assert put(client, number)
                assert has(client, number)
            assert not any(works(lambda number=number: has(client, number)) for number in range(10))  # type: ignore[misc]
            assert client.remove_many([b"key-0"], force=True) == [True]
        finally:
            assert remount(disk, "rw")
        fleet.wait_ok()
        assert [number for number in range(20) if not has(client, number)] == [0]
        wait_until(lambda: fleet.counter("offloaded") >= 20, "the rest is offloaded too")
        fleet.nodes["n0"].kill()
        fleet.start_node("n0")
        fleet.wait_ok()
        assert [number for number in range(20) if not has(client, number)] == [0]
        fleet.close()


@pytest.mark.parametrize("how", ["full", "limit"])
def test_a_journal_that_cannot_grow(nursery: Nursery, how: str) -> None:
    """Nothing new is acknowledged, what is there can be read; afterwards nothing acknowledged is missing."""
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(open_fleet(nursery, start=False))
        if how == "full":
            disk = stack.enter_context(small_disk(fleet.data_dir, 4 * MIB))
        master = fleet.start_master()
        fleet.start_node("n0")
        fleet.wait_ok()
        client = fleet.client()
        for number in range(10):
            assert put(client, number)
        with limited(master, resource.RLIMIT_FSIZE, 0) if how == "limit" else contextlib.nullcontext():
            hog = fill_disk(disk) if how == "full" else None
            with pytest.raises(NoSpace, match="journal"):
                put_all(client, range(10, 1000))  # the last page of the file has some room
            assert all(has(client, number) for number in range(10))
            assert "stored" in client.why(b"key-3")
            fleet.check()
            if hog is not None:
                hog.unlink()
        wait_until(lambda: works(lambda: put(client, 2000)), "puts work again")
        acknowledged = [number for number in range(1000) if client.exist_many([b"key-%d" % number])[0]]
        wait_until(lambda: not lacks(fleet, acknowledged), "a snapshot has made up for what was lost")
        fleet.restart_master()
        assert all(has(client, number) for number in (*acknowledged, 2000))
        wait_until(lambda: works(lambda: put(client, 2001)), "puts work")
        fleet.wait_settled()
        fleet.close()


def test_a_master_that_is_killed_while_its_disk_is_full(nursery: Nursery) -> None:
    """It starts on what is there, serves it, and takes more when there is room again."""
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(open_fleet(nursery, start=False))
        disk = stack.enter_context(small_disk(fleet.data_dir, 4 * MIB))
        fleet.start_master()
        fleet.start_node("n0")
        client = fleet.client()
        for number in range(10):
            assert put(client, number)
        hog = fill_disk(disk)
        with pytest.raises(NoSpace, match="journal"):
            put_all(client, range(10, 1000))
        for _ in range(2):
            fleet.restart_master()
            wait_until(lambda: has_all(client, range(10)), "what was stored is read")
        assert "stored" in client.why(b"key-3")
        with pytest.raises(MoonpoolError):
            put_all(client, range(1000, 1100))
        hog.unlink()
        wait_until(lambda: works(lambda: put(client, 2000)), "puts work again")
        wait_until(lambda: not lacks(fleet, [*range(10), 2000]), "a snapshot has made up for it")
        fleet.restart_master()
        assert all(has(client, number) for number in (*range(10), 2000))
        fleet.wait_settled()
        fleet.close()


def lacks(fleet: Fleet, numbers: list[int]) -> bool:
    """Whether a master that started now would miss any of them."""
    restored = fleet.restored()
    restored.check_integrity()
    return not all(restored.exist([b"key-%d" % number for number in numbers], 0.0))


# file handles


def test_a_master_without_file_handles(nursery: Nursery) -> None:
    with open_fleet(nursery) as fleet:
        fleet.start_node("n0")
        old = fleet.client()
        assert put(old, 1)
        assert fleet.master is not None
        with no_handles(fleet.master):
            new = fleet.client(rpc_timeout_s=0.5, connect_timeout_s=0.5)
            with pytest.raises(Unavailable):
                new.get(b"key-1")
            assert has(old, 1), "who is there is served"
            assert put(old, 2)
        wait_until(lambda: works(lambda: has(new, 1)), "new ones are let in again")
        wait_until(lambda: works(lambda: put(new, 3)), "and may put")
        fleet.wait_ok()
        fleet.check()


@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
def test_a_node_without_file_handles(nursery: Nursery, shm: bool) -> None:
    with open_fleet(nursery) as fleet:
        node = fleet.start_node("n0")
        old, new = fleet.client(), fleet.client(shm=shm, transfer_timeout_s=0.5, connect_timeout_s=0.5)
        assert put(old, 1)
        port = fleet.port_of("n0.dram")
        with no_handles(node), socket.create_connection(("127.0.0.1", port)):  # accept() has taken one beforehand
            with pytest.raises(Unavailable):
                new.get(b"key-1")
            assert not works(lambda: put(new, 2))
            assert has(old, 1), "who is there is served"
            assert put(old, 3)
        wait_until(lambda: works(lambda: has(new, 1)), "new ones are let in again")
        wait_until(lambda: works(lambda: put(new, 4)), "and may put")
        assert fleet.counter("corrupt_replicas") == 0
        fleet.wait_settled()


def test_a_client_without_file_handles(nursery: Nursery) -> None:
    with open_fleet(nursery, put_discard_s=0.5, put_release_s=0.6, lease_s=0.3) as fleet:
        fleet.start_node("n0")
        ledger = fleet.folder / "ledger"
        load = fleet.actor(
            "load",
            ledger=str(ledger),
            client_number=0,
            num_clients=1,
            num_keys=10,
            max_nbytes=10_000,
            seed=1,
            rpc_timeout_s=0.2,
        )
        load.expect("ready")
        load.expect("paused")
        with no_handles(load):
            load.say("go")
            wait_until(lambda: len(read_ledger(ledger).errors) > 10, "it is told")
            told = read_ledger(ledger)
            assert set(told.errors) <= {"unavailable", "peer_lost", "breaker_open"}, told.errors
            assert told.num_acknowledged == 0
        wait_until(lambda: read_ledger(ledger).num_acknowledged > 10, "it works again")
        load.say("pause")
        load.expect("paused")
        check_ledgers([read_ledger(ledger)])
        fleet.wait_settled()


# names and masters


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_second_node_of_one_name(nursery: Nursery, where: str) -> None:
    """On one machine its session registry is taken; on another the master refuses it while the first one lives."""
    with open_fleet(nursery) as fleet:
        fleet.start_node("n0")
        client = fleet.client()
        assert put(client, 1)
        run_dir = fleet.run_dir if where == "here" else str(fleet.folder / "elsewhere")
        second = fleet.bear_node("n0", dram_nbytes=MIB, run_dir=run_dir, start_timeout_s=0.7)
        assert second.hear().startswith("error config ")
        second.wait_gone()
        assert has(client, 1)
        assert put(client, 2)
        assert len(fleet.stats().segments) == 1


def test_a_master_that_never_comes_back(nursery: Nursery) -> None:
    """A client reads on what it remembers; every other call ends with an error, at its deadline.

    A place is remembered from the look-up that finds it on disk in the journal, so here each record is synced at once:
    with the usual interval, how long the host stalled would decide which calls need the master.
    """
    with open_fleet(nursery, journal_sync_s=0.0, lease_s=3600.0) as fleet:
        fleet.start_node("n0")
        client = fleet.client(rpc_timeout_s=1.0, retry_s=600.0)
        assert put(client, 1)
        assert put(client, 2)
        (view,) = client.view_many([b"key-1"])
        assert fleet.master is not None
        fleet.master.kill()
        assert client.exist_many([b"key-1"]) == [True]
        assert has(client, 1)
        for ask in (
            lambda: client.get(b"key-2"),
            lambda: client.exist_many([b"key-2"]),
            lambda: client.exist_many([b"key-1", b"key-2"]),
            lambda: put(client, 3),
            lambda: client.view_many([b"key-1"]),  # a pin is the master's to give
        ):
            began_s = time.monotonic()
            with pytest.raises(Unavailable):
                ask()
            assert time.monotonic() - began_s < HANG_S / 2, "it ends at its deadline"
        errors = client.put_objects([Put(b"a", [b"1"]), Put(b"b", [b"2"])])
        assert [isinstance(error, Unavailable) for error in errors] == [True, True]
        assert version_in(view.pieces[0], 1) == 1  # type: ignore[union-attr]


def test_space_that_was_granted_to_nobodys_knowledge_comes_back(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The master stands still, the client gives up, and the put is begun all the same."""
    monkeypatch.setattr(ahead, "_LOOK_S", 0.1)
    with open_fleet(nursery) as fleet:
        fleet.start_node("n0")
        client = fleet.client(rpc_timeout_s=0.3)
        wait_until(lambda: works(lambda: put(client, 1)), "the master answers")
        assert fleet.master is not None
        fleet.master.stop()
        with pytest.raises(Unavailable):
            put(client, 2)
        fleet.master.resume()
        wait_until(lambda: works(lambda: bool(fleet.check().homeless)), "it was granted")
        wait_until(lambda: works(lambda: put(client, 2)), "whose key it is knows better")
        assert has(client, 2)
        fleet.master.stop()
        with pytest.raises(Unavailable):
            put(client, 3)
        fleet.master.resume()
        wait_until(lambda: works(lambda: put(client, 4)), "the master is back")

        def is_free() -> bool:
            fleet.pass_time()  # what is unfinished is given up, and the client asks what the master granted it
            return fleet.check().homeless == [] or (works(lambda: put(client, 5, replace=True)) and False)

        wait_until(is_free, "it is free")
