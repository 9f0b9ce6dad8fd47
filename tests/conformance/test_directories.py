"""What every directory of segments must do. A new one adds itself to WAYS."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import HANG_S, wait_until

from moonpool.base.clock import VirtualClock
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import AlreadyExists, NotFound, Unavailable
from moonpool.base.rpc import BlockingClient
from moonpool.master.service import Master, MasterConfig
from moonpool.store import MasterDirectory
from moonpool.store.messages import SERVICE, Announce
from moonpool.transfer.directory import Directory, MemoryDirectory

WAYS = ("memory", "master")
TTL_S = 0.3


def segment(name: str, incarnation: int = 1, nbytes: int = 5) -> SegmentDescriptor:
    return SegmentDescriptor(
        name=name, nbytes=nbytes, incarnation=incarnation, host="h", endpoints=("shm:/x", "tcp:10.0.0.1:5")
    )


class MasterThread:
    """A real master on a loop of its own; it may die and come back. Its clock moves only when it is told."""

    def __init__(self, tmp_path: Path) -> None:
        self.address = f"unix:{tmp_path}/m.sock"
        self.clock = VirtualClock()
        self._data_dir = str(tmp_path / "data")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.start()

    def start(self) -> None:
        self._master = Master(MasterConfig(data_dir=self._data_dir, listen=self.address), self.clock)
        asyncio.run_coroutine_threadsafe(self._master.start(), self._loop).result(HANG_S)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._master.close(), self._loop).result(HANG_S)

    def has_renewed(self, name: str) -> bool:
        """Whether it was announced since the clock moved: it lasts as long as it can."""
        return self._master.board.find(name, self.clock.now_s() + 0.9 * TTL_S) is not None

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


def is_found(directory: Directory, name: str) -> bool:
    try:
        directory.find(name)
    except (NotFound, Unavailable):
        return False
    return True


def test_a_dead_owner_is_forgotten_and_a_living_one_is_not(master: MasterThread) -> None:
    living, gone = MasterDirectory(master.address, ttl_s=TTL_S), BlockingClient(master.address, SERVICE)
    living.publish(segment("alive"))
    gone.call(Announce(segment("dead"), TTL_S), timeout_s=HANG_S)  # its process is gone: no renewal, no farewell
    gone.close()
    assert is_found(living, "dead")
    for _ in range(4):
        master.clock.advance(TTL_S / 3)
        wait_until(lambda: master.has_renewed("alive"), "the living one is announced again")
    assert not is_found(living, "dead")
    assert is_found(living, "alive")
    living.close()


def test_a_restarted_master_is_told_again(master: MasterThread) -> None:
    directory = MasterDirectory(master.address, ttl_s=TTL_S)
    directory.publish(segment("kv"))
    master.stop()
    assert not is_found(directory, "kv")
    master.start()
    wait_until(lambda: is_found(directory, "kv"), "it is announced again")
    directory.close()


def test_a_name_taken_by_a_newer_owner_is_given_up(master: MasterThread, caplog: pytest.LogCaptureFixture) -> None:
    old, new = MasterDirectory(master.address, ttl_s=TTL_S), MasterDirectory(master.address, ttl_s=TTL_S)
    old.publish(segment("kv", incarnation=1))
    new.publish(segment("kv", incarnation=2))
    wait_until(lambda: "newer incarnation" in caplog.text, "the refusal is logged")
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
