"""Whole engines in processes of their own: killed and started again under the same name, and leaving messages."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop
from engine_child import EngineProcess, running_master
from forked_script import ForkServer, fork_server
from waiting import HANG_S

from moonpool.base.checksum import crc32c
from moonpool.base.errors import Cancelled, MoonpoolError, NotFound, PeerLost
from moonpool.store import MasterDirectory
from moonpool.transfer import (
    Directory,
    Notification,
    RemoteSegment,
    TransferConfig,
    TransferEngine,
    TransferOp,
    TransferRequest,
)

NBYTES = 4 << 20
WAYS = pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


def make_engine(folder: Path, directory: Directory | None = None, **settings: Any) -> TransferEngine:
    return TransferEngine(TransferConfig(run_dir=str(folder / "own"), **settings), directory=directory)


def first_byte(remote: RemoteSegment) -> int:
    back = bytearray(1)
    remote.read_into(0, [back], timeout_s=HANG_S)
    return back[0]


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with fork_server(Path(__file__).with_name("engine_child.py")) as server:
        yield server


@pytest.fixture(params=["peer", "master"])
def master(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str | None]:
    """None: peers are asked directly."""
    with contextlib.ExitStack() as undo:
        yield None if request.param == "peer" else undo.enter_context(running_master(tmp_path))


@WAYS
def test_an_owner_killed_and_started_again_is_found_anew(
    forks: ForkServer, tmp_path: Path, master: str | None, shm: bool
) -> None:
    directory = None if master is None else MasterDirectory(master)
    with contextlib.ExitStack() as undo:
        peer = undo.enter_context(make_engine(tmp_path, directory, tcp_host=None))
        first = undo.enter_context(EngineProcess(forks, tmp_path, {"kv": NBYTES}, master=master, shm=shm))
        target = f"kv@{first.address}" if master is None else "kv"
        first.ask("fill", name="kv", byte=1)
        old = peer.open(target)
        assert old.transport == ("shm" if shm else "tcp")
        assert first_byte(old) == 1
        first.kill()
        with pytest.raises(PeerLost):
            first_byte(old)
        second = undo.enter_context(
            EngineProcess(forks, tmp_path, {"kv": NBYTES}, master=master, shm=shm, tcp_port=first.port)
        )
        assert second.incarnation > first.incarnation
        second.ask("fill", name="kv", byte=2)
        for use in (first_byte, lambda remote: remote.notify(b"x", timeout_s=HANG_S)):
            with pytest.raises((NotFound, PeerLost)):
                use(old)
        new = peer.open(target)
        assert new is not old
        assert first_byte(new) == 2
        assert peer.find(target).incarnation == second.incarnation
        assert second.ask("take", timeout_s=0) == []
        if directory is not None:
            directory.close()


def test_a_batch_under_way_when_the_owner_dies_fails_soon(forks: ForkServer, tmp_path: Path) -> None:
    with (
        EngineProcess(forks, tmp_path, {"kv": NBYTES}, shm=False) as owner,
        make_engine(tmp_path, tcp_host=None) as peer,
    ):
        remote = peer.open(f"kv@{owner.address}")
        buffer = bytearray(NBYTES)
        read = TransferRequest(TransferOp.READ, remote, 0, [buffer])
        batches = [peer.submit([read], timeout_s=5 * HANG_S) for _ in range(50)]
        owner.kill()
        started_s = time.monotonic()
        errors = [type(failure_of(batch)) for batch in batches]
        assert time.monotonic() - started_s < HANG_S / 2
        assert PeerLost in errors
        assert set(errors) <= {PeerLost, type(None)}


def failure_of(batch: Any) -> MoonpoolError | None:
    try:
        batch.wait(HANG_S)
    except MoonpoolError as error:
        return error
    return None


@WAYS
def test_a_message_comes_after_the_bytes(forks: ForkServer, tmp_path: Path, shm: bool) -> None:
    """The owner looks at its memory the moment a message is there, and finds what the message is about."""
    with (
        EngineProcess(forks, tmp_path, {"kv": NBYTES}, shm=shm) as owner,
        make_engine(tmp_path, slice_nbytes=65536) as peer,
    ):
        remote = peer.open(f"kv@{owner.address}")
        with ThreadPoolExecutor(1) as pool:
            for number in range(1, 21):
                content = bytes([number]) * NBYTES
                looking = pool.submit(owner.ask, "crc_when_told", name="kv")
                requests = [
                    TransferRequest(TransferOp.WRITE, remote, at, [content[at : at + 500_000]])
                    for at in range(0, NBYTES, 500_000)
                ]
                peer.submit(requests, notify=b"written").wait()
                assert looking.result(HANG_S) == crc32c(content)


@WAYS
@LOOPS
def test_messages_from_another_process(forks: ForkServer, tmp_path: Path, shm: bool, run: Any) -> None:
    """Taken by a thread first, then by a coroutine."""
    with EngineProcess(forks, tmp_path) as sender, make_engine(tmp_path, shm=shm) as owner:
        owner.register("kv", nbytes=NBYTES)
        target = f"kv@{owner.addresses[0]}"
        asking = threading.Thread(
            target=lambda: sender.ask("write", target=target, byte=7, nbytes=NBYTES, notify="seven")
        )
        asking.start()
        assert owner.notifications(10) == [Notification("kv", b"seven")]
        assert bytes(owner.segment("kv").memory) == b"\x07" * NBYTES
        asking.join()
        assert owner.notifications() == []

        async def receive() -> list[Notification]:
            waiting = asyncio.ensure_future(wait_for_message(owner))
            await asyncio.sleep(0)
            sent = asyncio.to_thread(sender.ask, "write", target=target, byte=8, nbytes=NBYTES, notify="eight")
            await asyncio.gather(waiting, sent)
            return owner.notifications()

        assert run(receive()) == [Notification("kv", b"eight")]
        assert bytes(owner.segment("kv").memory) == b"\x08" * NBYTES


async def wait_for_message(owner: TransferEngine) -> None:
    await owner.notified()


@LOOPS
def test_giving_up_waiting_for_messages_loses_none(tmp_path: Path, run: Any) -> None:
    async def receive(owner: TransferEngine, remote: RemoteSegment) -> list[bytes]:
        for _ in range(20):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(owner.notified(), 0.001)
        taken: list[bytes] = []
        for number in range(50):
            waiting = asyncio.ensure_future(wait_for_message(owner))
            sending = asyncio.to_thread(remote.notify, b"%d" % number, timeout_s=HANG_S)
            if number % 2:
                waiting.cancel()
            await asyncio.gather(sending, waiting, return_exceptions=True)
            taken += [each.message for each in owner.notifications()]
        return taken

    with make_engine(tmp_path) as owner, make_engine(tmp_path, tcp_host=None) as peer:
        remote = peer.open(owner.register("kv", nbytes=100))
        assert run(receive(owner, remote)) == [b"%d" % number for number in range(50)]
        owner.close()
        owner.notified().wait(HANG_S)  # an engine that is closed keeps nobody waiting
        assert owner.notifications(5) == []


@WAYS
@LOOPS
def test_everything_from_a_coroutine(forks: ForkServer, tmp_path: Path, shm: bool, run: Any) -> None:
    async def use(owner: EngineProcess, peer: TransferEngine) -> None:
        target = f"kv@{owner.address}"
        handles = await asyncio.gather(*(peer.opening(target) for _ in range(20)))
        assert len(set(handles)) == 1
        with pytest.raises(NotFound):
            await peer.opening(f"none@{owner.address}")
        [remote] = set(handles)
        content, back = bytes(range(256)) * (NBYTES // 256), bytearray(NBYTES)
        await peer.submit([TransferRequest(TransferOp.WRITE, remote, 0, [content])], notify=b"there")
        await peer.submit([TransferRequest(TransferOp.READ, remote, 0, [back])])
        assert back == content
        assert owner.ask("take", timeout_s=HANG_S) == [["kv", "there"]]
        await cancel_in_the_middle(peer, remote)

    with EngineProcess(forks, tmp_path, {"kv": NBYTES}, shm=shm) as owner, make_engine(tmp_path, tcp_host=None) as peer:
        run(use(owner, peer))


async def cancel_in_the_middle(peer: TransferEngine, remote: RemoteSegment) -> None:
    """The task gets its buffers back only when nobody touches them any more."""
    buffers = [bytearray(NBYTES) for _ in range(30)]
    batch = peer.submit([TransferRequest(TransferOp.READ, remote, 0, [buffer]) for buffer in buffers])

    async def wait() -> None:
        await batch

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0.002)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert batch.done()
    if batch.failure is not None:
        assert isinstance(batch.failure, Cancelled)
        assert "cancelled" in {batch.status(number).value for number in range(len(batch))}
    before = [crc32c(buffer) for buffer in buffers]
    await asyncio.sleep(0.05)
    assert [crc32c(buffer) for buffer in buffers] == before


def test_with_a_secret_between_processes(forks: ForkServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("known to both of them")
    secret.chmod(0o600)
    guarded: dict[str, Any] = {"secret_file": str(secret), "shm": False}
    with EngineProcess(forks, tmp_path, {"kv": NBYTES}, **guarded) as other, make_engine(tmp_path, **guarded) as here:
        here.register("back", nbytes=NBYTES)
        remote = here.open(f"kv@{other.address}")
        here.submit([TransferRequest(TransferOp.WRITE, remote, 0, [b"\x05" * NBYTES])], notify=b"five").wait()
        assert other.ask("take", timeout_s=HANG_S) == [["kv", "five"]]
        assert other.ask("crc", name="kv") == crc32c(b"\x05" * NBYTES)
        other.ask("write", target=f"back@{here.addresses[0]}", byte=6, nbytes=NBYTES, notify="six")
        assert here.notifications(5) == [Notification("back", b"six")]
        assert bytes(here.segment("back").memory) == b"\x06" * NBYTES
