"""A role's Unix sockets are for its own user: by their mode, and by the kernel's word where the mode was opened."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rpc_service import Service
from waiting import HANG_S

from moonpool.base.address import bind_private
from moonpool.base.rpc import AsyncClient, BlockingClient, RpcPeer
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.shm.transport import ShmTransport

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
# Says how far it came: "refused" by the file's mode, "closed" by the process behind it.
CALLER = """
import os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)  # nobody
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(10)
try:
    sock.connect(sys.argv[1])
    sock.sendall(bytes(24))
    print("answered" if sock.recv(1) else "closed")
except (PermissionError, ConnectionRefusedError):
    print("refused")
except (ConnectionResetError, BrokenPipeError):
    print("closed")
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="mp-open-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def call_as_nobody(path: Path) -> str:
    command = [sys.executable, "-I", "-c", CALLER, str(path)]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def wide_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def outcomes(path: Path) -> tuple[int, str, str]:
    """(mode, what another user gets, what it gets when the mode is opened)."""
    mode = stat.S_IMODE(path.stat().st_mode)
    by_mode = call_as_nobody(path)
    path.chmod(0o777)
    return mode, by_mode, call_as_nobody(path)


@needs_root
@pytest.mark.usefixtures("wide_umask")
async def test_a_server_turns_other_users_away(open_folder: Path) -> None:
    server = Service().server
    address = await server.listen(f"unix:{open_folder}/s.sock")
    try:
        assert await asyncio.to_thread(outcomes, open_folder / "s.sock") == (0o600, "refused", "closed")
        client = await AsyncClient.connect(address, "testing")  # our own user still gets in
        client.close()
    finally:
        await server.close()


@needs_root
@pytest.mark.usefixtures("wide_umask")
def test_memory_is_not_passed_to_other_users(open_folder: Path) -> None:
    transport = ShmTransport(str(open_folder))
    with Segment.allocate("memory", 4096, incarnation=1) as segment:
        path = Path(transport.serve(segment).partition(":")[2])
        try:
            assert outcomes(path) == (0o600, "refused", "closed")
        finally:
            transport.close()


def fill_queue(path: Path) -> list[socket.socket]:
    """Connect until the kernel refuses more: nothing accepts these connections."""
    waiting: list[socket.socket] = []
    while True:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except BlockingIOError:
            sock.close()
            return waiting
        waiting.append(sock)


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_a_client_waits_while_the_server_has_a_full_queue_of_connections(kind: str, tmp_path: Path) -> None:
    service, address = Service(), f"unix:{tmp_path}/full.sock"
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(bind_private(str(tmp_path / "full.sock")))
        listener.listen(1)
        for sock in fill_queue(tmp_path / "full.sock"):
            stack.enter_context(sock)
        if kind == "asyncio":
            connecting = asyncio.create_task(asynchronously(address))
        else:
            connecting = asyncio.create_task(asyncio.to_thread(blockingly, address))
        done, _ = await asyncio.wait([connecting], timeout=0.05)
        assert not done, "refused, or connected to nothing"
        server = await asyncio.get_running_loop().create_unix_server(lambda: RpcPeer(service.server), sock=listener)
        stack.callback(server.close)
        stack.push_async_callback(service.server.close)
        assert await connecting == "testing"


async def asynchronously(address: str) -> str:
    client = await AsyncClient.connect(address, "testing", timeout_s=HANG_S)
    client.close()
    await client.closed.wait()
    assert client.peer is not None
    return client.peer.service


def blockingly(address: str) -> str:
    client = BlockingClient(address, "testing", connect_timeout_s=HANG_S)
    try:
        return client.connect(timeout_s=HANG_S).service
    finally:
        client.close()
