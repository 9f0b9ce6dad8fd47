"""What every directory of segments must do. A new one adds itself to WAYS."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import AlreadyExists, NotFound, Unavailable
from moonpool.master.service import Master, MasterConfig
from moonpool.store import MasterDirectory
from moonpool.transfer.directory import Directory, MemoryDirectory

WAYS = ("memory", "master")


def segment(name: str, incarnation: int = 1, nbytes: int = 5) -> SegmentDescriptor:
    return SegmentDescriptor(
        name=name, nbytes=nbytes, incarnation=incarnation, host="h", endpoints=("shm:/x", "tcp:10.0.0.1:5")
    )


class MasterThread:
    """A real master on a loop of its own; it may die and come back."""

    def __init__(self, tmp_path: Path) -> None:
        self.address = f"unix:{tmp_path}/m.sock"
        self._data_dir = str(tmp_path / "data")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.start()

    def start(self) -> None:
        self._master = Master(MasterConfig(data_dir=self._data_dir, listen=self.address))
        asyncio.run_coroutine_threadsafe(self._master.start(), self._loop).result(10)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._master.close(), self._loop).result(10)

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterThread]:
    made = MasterThread(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=WAYS)
def two(request: pytest.FixtureRequest) -> Iterator[tuple[Directory, Directory]]:
    """The same directory, as two processes would see it."""
    if request.param == "memory":
        shared = MemoryDirectory()
        yield shared, shared
        return
    address = request.getfixturevalue("master").address
    made = MasterDirectory(address, name="one"), MasterDirectory(address, name="two")
    yield made
    for each in made:
        each.close()


def test_what_one_publishes_the_other_finds(two: tuple[Directory, Directory]) -> None:
    one, other = two
    with pytest.raises(NotFound, match="kv"):
        other.find("kv")
    one.publish(segment("kv"))
    one.publish(segment("odd name/@:ü"))
    assert other.find("kv") == segment("kv")
    assert other.find("odd name/@:ü") == segment("odd name/@:ü")
    one.publish(segment("kv"))  # again
    one.withdraw(segment("kv"))
    one.withdraw(segment("kv"))
    with pytest.raises(NotFound):
        other.find("kv")


def test_the_newer_incarnation_counts(two: tuple[Directory, Directory]) -> None:
    one, other = two
    one.publish(segment("kv", incarnation=5))
    with pytest.raises(AlreadyExists, match="newer"):
        other.publish(segment("kv", incarnation=4))
    other.publish(segment("kv", incarnation=6, nbytes=7))
    one.withdraw(segment("kv", incarnation=5))
    assert one.find("kv") == segment("kv", incarnation=6, nbytes=7)


def test_closing_withdraws(two: tuple[Directory, Directory]) -> None:
    one, other = two
    one.publish(segment("kv"))
    one.close()
    one.close()
    with pytest.raises(NotFound):
        other.find("kv")


def eventually(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if holds():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen in time")


def is_found(directory: Directory, name: str) -> bool:
    try:
        directory.find(name)
    except (NotFound, Unavailable):
        return False
    return True


def test_a_dead_owner_is_forgotten_and_a_living_one_is_not(master: MasterThread) -> None:
    living, dying = MasterDirectory(master.address, ttl_s=1.5), MasterDirectory(master.address, ttl_s=1.5)
    living.publish(segment("alive"))
    dying.publish(segment("dead"))
    dying._ending.set()  # as if its process were gone: no renewal, no farewell
    eventually(lambda: not is_found(living, "dead"))
    assert is_found(living, "alive")
    dying.close()
    living.close()


def test_a_restarted_master_is_told_again(master: MasterThread) -> None:
    directory = MasterDirectory(master.address, ttl_s=0.3)
    directory.publish(segment("kv"))
    master.stop()
    assert not is_found(directory, "kv")
    master.start()
    eventually(lambda: is_found(directory, "kv"))
    directory.close()


def test_a_name_taken_by_a_newer_owner_is_given_up(master: MasterThread, caplog: pytest.LogCaptureFixture) -> None:
    old, new = MasterDirectory(master.address, ttl_s=1.5), MasterDirectory(master.address, ttl_s=1.5)
    old.publish(segment("kv", incarnation=1))
    new.publish(segment("kv", incarnation=2))
    eventually(lambda: "newer incarnation" in caplog.text)
    assert old.find("kv").incarnation == 2
    old.close()
    assert new.find("kv").incarnation == 2
    new.close()


def test_a_master_out_of_reach_is_said(tmp_path: Path) -> None:
    directory = MasterDirectory(f"unix:{tmp_path}/none.sock", timeout_s=0.5)
    with pytest.raises(Unavailable):
        directory.publish(segment("kv"))
    with pytest.raises(Unavailable):
        directory.find("kv")
    directory.close()
