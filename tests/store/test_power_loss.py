"""The master loses power, and with it the grants that its disk had not got. The processes are real; the end of the
journal is cut off by putting back the folder of the master as it was before.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from severe import check_bytes
from store_pool import MIB, LocalPool, ProcessPool, RoleProcess, forked_roles
from waiting import wait_until

from moonpool.base.errors import NotFound
from moonpool.store import Store
from moonpool.store.client.ahead import HeldPlace, HeldSpace

NBYTES = 700 * 1024  # more than half of the node's memory
VALUE = bytes(range(256)) * (NBYTES // 256)


@pytest.fixture(scope="module", autouse=True)
def roles() -> Iterator[None]:
    with forked_roles():
        yield


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[ProcessPool]:
    with ExitStack() as stack:
        yield ProcessPool(tmp_path, stack)


class MasterPower:
    """Of the master of a ProcessPool."""

    def __init__(self, pool: ProcessPool) -> None:
        self._pool = pool
        self._data, self._synced = pool.tmp_path / "data", pool.tmp_path / "synced"

    def sync(self) -> None:
        """What the master has written is on disk; what it writes from now on is not."""
        shutil.copytree(self._data, self._synced)

    def lose(self) -> None:
        self._pool.master.kill()
        shutil.rmtree(self._data)
        self._synced.rename(self._data)

    def restart(self, client: Store) -> None:
        """Return when every node has reported to the new master."""
        self._pool.start_master(lease_s=0.2)
        wait_until(lambda: all(each.status == "ok" for each in client.stats().segments), "the nodes have reported")


def tell(writer: RoleProcess) -> str:
    """Let the writer write, and return its outcome."""
    writer.process.send_signal(signal.SIGUSR1)
    assert writer.process.stdout is not None
    return writer.process.stdout.readline().strip()


@pytest.mark.parametrize("num_losses", [1, 2])
@pytest.mark.parametrize("shm", [True, False], ids=["in place", "over tcp"])
def test_a_view_does_not_change_when_a_lost_grant_is_written(pool: ProcessPool, shm: bool, num_losses: int) -> None:
    """The object was evicted for that grant. The next master knows of neither."""
    power = MasterPower(pool)
    pool.start_master(lease_s=0.2)
    pool.start_node("n0", MIB)
    client = pool.client()
    assert client.put(b"old", VALUE)
    power.sync()
    writer = pool.start_client("write_when_told", key="new", nbytes=NBYTES, shm=shm)
    assert writer.line.startswith("granted ")
    assert client.exist_many([b"old"]) == [False], "it was evicted"
    for number in range(num_losses):
        if number:
            power.sync()
        power.lose()
        power.restart(client)
    with client.view(b"old") as view:
        assert not view.is_copy
        outcome = tell(writer)
        check_bytes(bytes(view.pieces[0]), VALUE, "a view that is held")
    assert outcome.startswith("StaleGeneration: "), outcome
    check_bytes(client.get(b"old") or b"", VALUE, "the object")
    with pytest.raises(NotFound):
        client.view(b"new")


@pytest.mark.parametrize("shm", [True, False], ids=["in place", "over tcp"])
def test_a_put_that_the_journal_knows_goes_on(pool: ProcessPool, shm: bool) -> None:
    """Across two losses, between which another put was granted and lost: its generation is between refused ones."""
    power = MasterPower(pool)
    pool.start_master(lease_s=0.2)
    pool.start_node("n0", 4 * MIB)
    client = pool.client()
    known = pool.start_client("write_when_told", key="first", nbytes=NBYTES, shm=shm)
    power.sync()
    power.lose()
    power.restart(client)
    later = pool.start_client("write_when_told", key="second", nbytes=NBYTES, shm=shm)
    power.sync()
    lost = pool.start_client("write_when_told", key="third", nbytes=NBYTES, shm=shm)
    power.lose()
    power.restart(client)
    outcomes = [tell(each) for each in (known, later, lost)]
    assert outcomes[:2] == ["stored", "stored"]
    assert outcomes[2].startswith("StaleGeneration: ")
    written = b"\xee" * NBYTES
    for key in (b"first", b"second"):
        check_bytes(client.get(key) or b"", written, key.decode())


def test_places_granted_ahead_are_not_used_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next master may not know them. What it does know is given back to it."""
    pool = LocalPool(tmp_path, 4 * MIB)
    try:
        client, used = pool.client(), list[HeldPlace]()
        take = HeldSpace.take

        def note(self: HeldSpace, nbytes: int) -> HeldPlace | None:
            held = take(self, nbytes)
            used.extend([] if held is None else [held])
            return held

        monkeypatch.setattr(HeldSpace, "take", note)
        for number in range(3):
            assert client.put(b"%d" % number, b"v")
        (before, *_) = used
        pool.loop.run(pool.master.close())
        pool.start_master()
        used.clear()
        assert client.put(b"connects", b"v", replace=True)
        for number in range(3, 6):
            assert client.put(b"%d" % number, b"v")
        assert len(used) == 3
        assert {each.master for each in used} == {client.master.incarnation}
        assert before.master != client.master.incarnation
        client.close()
        wait_until(lambda: pool.on_loop(lambda: pool.master.state.puts.ahead_nbytes) == 0, "all is given back")
        assert pool.on_loop(lambda: pool.master.state.stats().used_nbytes) == 7 * 2 * 4096, "header and value of seven"
        pool.check_integrity()
    finally:
        pool.close()
