"""Engines as a user sees them: memory of every kind offered under a name, and found by it from elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_child import running_master
from waiting import HANG_S

from moonpool.base.errors import (
    AlreadyExists,
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    NotFound,
    PeerLost,
    Unauthorized,
    Unavailable,
)
from moonpool.store import MasterDirectory
from moonpool.transfer import (
    Directory,
    MemoryDirectory,
    RawMemory,
    RemoteSegment,
    Segment,
    SegmentDescriptor,
    TransferConfig,
    TransferEngine,
    as_bytes_view,
    host_id,
)
from moonpool.transfer.directory import SegmentTarget, parse_target

NBYTES = 8192
DATA = bytes(range(256)) * (NBYTES // 256)


def make_engine(folder: Path, directory: Directory | None = None, **settings: Any) -> TransferEngine:
    return TransferEngine(TransferConfig(run_dir=str(folder / "run"), **settings), directory=directory)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    with running_master(tmp_path) as address:
        yield address


@pytest.fixture(params=["peer", "memory", "master"])
def find_by(request: pytest.FixtureRequest) -> Iterator[Callable[[], Directory | None]]:
    """Makes the directory of one engine; None where the peer itself is asked."""
    with contextlib.ExitStack() as undo:
        if request.param == "memory":
            shared = MemoryDirectory()
            yield lambda: shared
        elif request.param == "master":
            address = request.getfixturevalue("master")
            yield lambda: undo.enter_context(contextlib.closing(MasterDirectory(address)))
        else:
            yield lambda: None


def target(owner: TransferEngine, name: str, directory: Directory | None) -> str:
    return f"{name}@{owner.addresses[0]}" if directory is None else name


def raw_memory() -> RawMemory:
    memory = (ctypes.c_ubyte * NBYTES)()
    return RawMemory(ctypes.addressof(memory), NBYTES, owner=memory)


KINDS: dict[str, Callable[[], Any]] = {
    "bytearray": lambda: bytearray(NBYTES),
    "mmap": lambda: mmap.mmap(-1, NBYTES),
    "numpy": lambda: np.zeros((8, NBYTES // 32), np.float32),
    "torch": lambda: torch.zeros(NBYTES // 4, dtype=torch.int32),
    "bfloat16": lambda: torch.zeros(NBYTES // 2, dtype=torch.bfloat16),
    "pointer": raw_memory,
    "cpu:0": lambda: None,
    "ssd": lambda: None,
}
WAY = {"cpu:0": "shm", "ssd": "file"}  # of the kinds that others on this machine reach without the network


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_every_kind_is_found_and_reached(
    tmp_path: Path, find_by: Callable[[], Directory | None], kind: str
) -> None:
    memory = KINDS[kind]()
    settings: dict[str, Any] = {} if memory is not None else {"nbytes": NBYTES, "location": kind}
    if kind == "ssd":
        settings["location"] = f"ssd:{tmp_path}/kv"
    mine, its = find_by(), find_by()
    with make_engine(tmp_path, mine) as owner, make_engine(tmp_path, its, tcp_host=None) as peer:
        descriptor = owner.register("kv", memory, **settings)
        text = target(owner, "kv", its)
        assert peer.find(text) == descriptor
        assert (descriptor.nbytes, descriptor.host, descriptor.incarnation) == (NBYTES, host_id(), owner.incarnation)
        remote = peer.open(text)
        assert peer.open(text) is remote
        assert remote.transport == WAY.get(kind, "tcp")
        check_bytes(remote)
        if memory is not None:
            assert bytes(as_bytes_view(memory, False)) == DATA
        elif kind == "cpu:0":
            assert bytes(owner.segment("kv").memory) == DATA


def check_bytes(remote: RemoteSegment) -> None:
    remote.write_from(0, [DATA[:100], DATA[100:]], generation=1, timeout_s=HANG_S)
    back = bytearray(NBYTES)
    remote.read_into(0, [back], timeout_s=HANG_S)
    assert back == DATA
    with pytest.raises(InvalidInput):
        remote.read_into(1, [back], timeout_s=HANG_S)


def test_a_drive_is_reached_from_another_machine_too(tmp_path: Path) -> None:
    with make_engine(tmp_path) as owner, make_engine(tmp_path, tcp_host=None) as peer:
        owner.register("kv", nbytes=NBYTES, location=f"ssd:{tmp_path}/kv")
        descriptor = peer.find(f"kv@{owner.addresses[0]}")
        far = SegmentDescriptor(
            name="kv", nbytes=NBYTES, incarnation=descriptor.incarnation, host="elsewhere",
            endpoints=descriptor.endpoints, location=descriptor.location,
        )  # fmt: skip
        remote = peer.open(far)
        assert remote.transport == "tcp"
        check_bytes(remote)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("kv", SegmentTarget("kv", None)),
        ("kv@host:5", SegmentTarget("kv", "tcp:host:5")),
        ("a@b@10.0.0.1:5", SegmentTarget("a@b", "tcp:10.0.0.1:5")),
        ("a@b", SegmentTarget("a@b", None)),
        ("a:b", SegmentTarget("a:b", None)),
        ("kv@[::1]:5", SegmentTarget("kv", "tcp:[::1]:5")),
    ],
)
def test_targets(text: str, found: SegmentTarget) -> None:
    assert parse_target(text) == found


@pytest.mark.parametrize("text", ["@host:5", "kv@host:", "kv@host:x", "kv@:5", "kv@::1:5", "kv@h:65536", "kv@[h]:5"])
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"peer|brackets"):
        parse_target(text)


@pytest.mark.parametrize("name", ["pages@home", "a b/ü", "x@1.2.3.4:5", "@", "kv" * 50])
def test_odd_names(tmp_path: Path, name: str) -> None:
    shared = MemoryDirectory()
    with make_engine(tmp_path, shared) as owner, make_engine(tmp_path, shared, tcp_host=None) as peer:
        descriptor = owner.register(name, bytearray(NBYTES))
        check_bytes(peer.open(f"{name}@{owner.addresses[0]}"))
        assert peer.open(shared.find(name)) is peer.open(descriptor)
        if name != "x@1.2.3.4:5":
            assert peer.find(name) == descriptor


def test_ipv6(tmp_path: Path) -> None:
    with make_engine(tmp_path, tcp_host="::1", shm=False) as owner, make_engine(tmp_path, tcp_host=None) as peer:
        owner.register("kv", bytearray(NBYTES))
        [address] = owner.addresses
        assert address.startswith("[::1]:")
        check_bytes(peer.open(f"kv@{address}"))
        assert peer.introduce(address).incarnation == owner.incarnation
        owner.close()
        with pytest.raises(PeerLost, match=r"tcp:\[::1\]:"):
            peer.find(f"kv@{address}")


def test_unknown_names_and_peers(tmp_path: Path, find_by: Callable[[], Directory | None]) -> None:
    mine, its = find_by(), find_by()
    with make_engine(tmp_path, mine) as owner, make_engine(tmp_path, its, tcp_host=None) as peer:
        owner.register("kv", bytearray(1))
        with pytest.raises(NotFound, match="other"):
            peer.open(target(owner, "other", its))
        with pytest.raises(NotFound, match="other"):
            peer.opening(target(owner, "other", its)).wait(HANG_S)
        if its is None:
            with pytest.raises(InvalidInput, match="without a directory"):
                peer.open("kv")


def test_a_port_where_nobody_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at tcp:127.0.0.1:{port}"):
            make_engine(tmp_path, tcp_port=port)
    with make_engine(tmp_path, tcp_host=None) as peer:
        with pytest.raises(PeerLost, match=f"127.0.0.1:{port}"):
            peer.open(f"kv@127.0.0.1:{port}")
        with pytest.raises(InvalidInput, match="host"):
            peer.open(f"kv@{'x' * 70}:{port}")


def test_a_peer_that_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, make_engine(tmp_path, timeout_s=0.3) as peer:
        started_s = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="did not answer"):
            peer.open(f"kv@127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(DeadlineExceeded):
            peer.introduce(f"127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - started_s < HANG_S / 2


def test_two_owners_of_one_name_and_incarnation_are_two(tmp_path: Path) -> None:
    with (
        make_engine(tmp_path) as one,
        make_engine(tmp_path) as two,
        make_engine(tmp_path, tcp_host=None) as peer,
        Segment.over("kv", bytearray(b"1"), incarnation=1) as first,
        Segment.over("kv", bytearray(b"2"), incarnation=1) as second,
    ):
        one.serve(first)
        two.serve(second)
        for owner, content in ((one, b"1"), (two, b"2")):
            back = bytearray(1)
            peer.open(f"kv@{owner.addresses[0]}").read_into(0, [back], timeout_s=HANG_S)
            assert back == content


def test_unregistering_withdraws_and_lets_go(tmp_path: Path, find_by: Callable[[], Directory | None]) -> None:
    mine, its = find_by(), find_by()
    with make_engine(tmp_path, mine) as owner, make_engine(tmp_path, its, tcp_host=None) as peer:
        for settings in ({"memory": bytearray(NBYTES)}, {"nbytes": NBYTES}):
            owner.register("kv", **settings)
            text, segment = target(owner, "kv", its), owner.segment("kv")
            remote = peer.open(text)
            owner.unregister("kv")
            owner.unregister("kv")
            with pytest.raises(Unavailable):
                segment.borrow()
            with pytest.raises((NotFound, PeerLost)):
                remote.read_into(0, [bytearray(1)], timeout_s=HANG_S)
            with pytest.raises(NotFound):
                peer.open(text)
            with pytest.raises(KeyError):
                owner.segment("kv")


def test_a_taken_name_leaves_nothing_behind(tmp_path: Path) -> None:
    with make_engine(tmp_path, MemoryDirectory()) as owner, make_engine(tmp_path, tcp_host=None) as peer:
        first = owner.register("kv", nbytes=NBYTES)
        before = open_files()
        for settings in ({"nbytes": 100}, {"memory": bytearray(5)}, {"nbytes": 100, "location": f"ssd:{tmp_path}/kv"}):
            with pytest.raises(AlreadyExists):
                owner.register("kv", **settings)
        assert open_files() == before
        assert peer.find(f"kv@{owner.addresses[0]}") == first
        check_bytes(peer.open(first))


def test_a_name_that_a_newer_owner_has(tmp_path: Path) -> None:
    shared = MemoryDirectory()
    with make_engine(tmp_path, shared) as old, make_engine(tmp_path, shared) as new:
        descriptor = new.register("kv", bytearray(1))
        with pytest.raises(AlreadyExists, match="newer"):
            old.register("kv", bytearray(1))
        with pytest.raises(NotFound):
            new.find(f"kv@{old.addresses[0]}")
        assert old.find("kv") == descriptor
        old.close()
        assert new.find("kv") == descriptor


def test_a_directory_out_of_reach(tmp_path: Path) -> None:
    directory = MasterDirectory(f"unix:{tmp_path}/none.sock", timeout_s=0.3)
    with make_engine(tmp_path, directory) as owner, make_engine(tmp_path, tcp_host=None) as peer:
        before = open_files()
        with pytest.raises(Unavailable, match=r"none\.sock"):
            owner.register("kv", nbytes=NBYTES)
        assert open_files() == before
        with pytest.raises(NotFound):
            peer.find(f"kv@{owner.addresses[0]}")
        with pytest.raises(KeyError):
            owner.segment("kv")
        with pytest.raises(Unavailable):
            owner.find("kv")
    directory.close()


class Flaky(MemoryDirectory):
    """One whose master dies after it was told."""

    def withdraw(self, descriptor: SegmentDescriptor) -> None:
        raise PeerLost("the master is gone")


def test_a_directory_lost_meanwhile_does_not_keep_memory(tmp_path: Path) -> None:
    before = open_files()
    with make_engine(tmp_path, Flaky()) as owner:
        owner.register("one", nbytes=NBYTES)
        owner.register("two", nbytes=NBYTES)
        segment = owner.segment("one")
        owner.unregister("one")
        with pytest.raises(Unavailable):
            segment.borrow()
    assert open_files() == before


def test_closing_withdraws_and_leaves_nothing(tmp_path: Path, find_by: Callable[[], Directory | None]) -> None:
    mine, its = find_by(), find_by()
    use_and_close(tmp_path, mine, its)  # a directory keeps its own thread and connection
    before, threads = open_files(), set(threading.enumerate())
    use_and_close(tmp_path, mine, its)
    for thread in set(threading.enumerate()) - threads:
        thread.join(HANG_S)
        assert not thread.is_alive(), thread.name
    assert open_files() == before
    assert not list((tmp_path / "run").iterdir())


def use_and_close(tmp_path: Path, mine: Directory | None, its: Directory | None) -> None:
    with make_engine(tmp_path, its, tcp_host=None) as peer:
        with make_engine(tmp_path, mine) as owner:
            owner.register("kv", nbytes=NBYTES)
            owner.register("more", bytearray(NBYTES))
            remotes = [peer.open(target(owner, name, its)) for name in ("kv", "more")]
            for remote in remotes:
                check_bytes(remote)
        for remote in remotes:
            with pytest.raises(PeerLost):
                remote.read_into(0, [bytearray(1)], timeout_s=HANG_S)
        if its is not None:
            with pytest.raises(NotFound):
                peer.find("kv")
        with pytest.raises(PeerLost, match="closed"):
            owner.register("late", nbytes=NBYTES)
        owner.close()


def test_an_engine_introduces_itself_with_its_topology(tmp_path: Path) -> None:
    with make_engine(tmp_path) as owner, make_engine(tmp_path, tcp_host=None) as peer:
        info = peer.introduce(owner.addresses[0])
        assert (info.host, info.incarnation) == (host_id(), owner.incarnation)
        assert info.topology == owner.topology
        assert info.topology is not None
        assert info.topology.hardware.nodes


def test_with_a_secret(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for file in (right, wrong):
        file.write_text(f"a secret that is {file.name}")
        file.chmod(0o600)
    guarded: dict[str, Any] = {"secret_file": str(right), "tcp_host": "::1", "shm": False}
    with make_engine(tmp_path, **guarded) as owner, make_engine(tmp_path, **guarded) as peer:
        owner.register("kv", bytearray(NBYTES))
        text = f"kv@{owner.addresses[0]}"
        check_bytes(peer.open(text))
        peer.open(text).notify(b"done", timeout_s=HANG_S)
        assert [each.message for each in owner.notifications(5)] == [b"done"]
        assert peer.introduce(owner.addresses[0]).incarnation == owner.incarnation
        for secret in (str(wrong), None):
            with make_engine(tmp_path, tcp_host=None, secret_file=secret) as stranger:
                for ask in (lambda: stranger.open(text), lambda: stranger.introduce(owner.addresses[0])):
                    with pytest.raises(Unauthorized):
                        ask()


def open_files() -> Counter[str]:
    """Return what this process has open, by kind: memory, files and sockets, not what a thread that is just starting
    opens for itself (epoll descriptors, files of the kernel).
    """
    gc.collect()
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[os.readlink(f"/proc/self/fd/{fd}").partition("[")[0]] += 1
    return Counter({kind: n for kind, n in found.items() if not kind.startswith(("anon_inode:", "/sys/", "/proc/"))})
