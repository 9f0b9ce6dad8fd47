"""`mooncake.engine` between two processes: bytes, codes, notifications, and peers that die."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from mooncake_peer import EnginePeer

from moonpool.integrations.mooncake.engine_cuda import has_cuda
from moonpool.integrations.mooncake.engine_types import TransferNotify, TransferOpcode
from moonpool.integrations.mooncake.http_metadata import KVBootstrapServer
from moonpool.integrations.mooncake.transfer_engine import MooncakeTransferEngine as TransferEngine

KIB, MIB = 1024, 1024 * 1024
P2P = "P2PHANDSHAKE"
MakePeer = Callable[..., EnginePeer]
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@pytest.fixture
def make_peer() -> Iterator[MakePeer]:
    with ExitStack() as stack:
        # A killed peer leaves its folder behind; it goes with this one.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-peers-"))

        def make(nbytes: int = 4 * MIB, env: dict[str, str] | None = None, **settings: object) -> EnginePeer:
            peer = EnginePeer(nbytes, env={"TMPDIR": folder} | (env or {}), **settings)  # type: ignore[arg-type]
            stack.callback(peer.close)
            return peer

        yield make


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    made = TransferEngine()
    assert made.initialize("127.0.0.1", P2P, "tcp", "") == 0
    yield made
    made.close()


def pattern(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def address_of(array: Bytes) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("kind", ["plain", "managed"])
def test_writes_and_reads_what_another_process_registered(
    engine: TransferEngine, make_peer: MakePeer, kind: str
) -> None:
    peer, source, target = make_peer(kind=kind), pattern(3 * MIB), np.zeros(3 * MIB, np.uint8)
    assert engine.register_memory(address_of(source), source.nbytes) == 0
    assert engine.transfer_sync_write(peer.name, address_of(source), peer.memory + 100, source.nbytes) == 0
    assert peer.ask("read_bytes_from_buffer", peer.memory + 100, 64) == source[:64].tobytes().hex()
    assert engine.transfer_sync_read(peer.name, address_of(target), peer.memory + 100, target.nbytes) == 0
    assert np.array_equal(source, target)


def test_a_batch_reaches_several_ranges_and_is_told_to_the_owner(engine: TransferEngine, make_peer: MakePeer) -> None:
    peer = make_peer(64 * KIB)
    other = peer.ask("allocate_managed_buffer", 64 * KIB)
    source, target = pattern(64 * KIB), np.zeros(64 * KIB, np.uint8)
    assert engine.batch_register_memory([address_of(source), address_of(target)], [source.nbytes, target.nbytes]) == 0
    starts = [0, 16 * KIB, 32 * KIB, 48 * KIB]
    there = [peer.memory, peer.memory + 16 * KIB, other + 100, other + 40 * KIB]
    sizes = [16 * KIB, 16 * KIB, 1000, 0]
    mine = [address_of(source) + start for start in starts]
    notify = TransferNotify("kv", "layer 3")
    assert engine.batch_transfer_sync(peer.name, mine, there, sizes, TransferOpcode.Write, notify) == 0
    assert peer.ask("get_notifies") == [["kv", "layer 3"]]
    assert peer.ask("get_notifies") == []
    back = [address_of(target) + start for start in starts]
    assert engine.batch_transfer_sync_read(peer.name, back, there, sizes) == 0
    for start, size in zip(starts, sizes, strict=True):
        assert np.array_equal(source[start : start + size], target[start : start + size])
    assert not target[33 * KIB :].any()
    assert engine.batch_unregister_memory([address_of(source), address_of(target)]) == 0


def test_async_calls_and_their_status(engine: TransferEngine, make_peer: MakePeer) -> None:
    peer, source, target = make_peer(), pattern(2 * MIB), np.zeros(2 * MIB, np.uint8)
    mine, back = address_of(source), address_of(target)
    first = engine.batch_transfer_async_write(peer.name, [mine], [peer.memory], [MIB])
    second = engine.transfer_submit_write(peer.name, mine + MIB, peer.memory + MIB, MIB)
    assert first > 0
    assert second > 0
    while (status := engine.transfer_check_status(second)) == 0:
        pass
    assert status == 1
    assert engine.transfer_check_status(second) == -1  # it was forgotten
    assert engine.get_batch_transfer_status([first]) == 0
    third = engine.batch_transfer_async(peer.name, [back], [peer.memory], [2 * MIB], TransferOpcode.Read)
    assert engine.get_batch_transfer_status([third]) == 0
    assert np.array_equal(source, target)
    bad = engine.batch_transfer_async_read(peer.name, [back], [peer.memory + 3 * MIB], [2 * MIB])
    assert bad > 0
    assert engine.get_batch_transfer_status([bad, third]) == -1


def test_only_registered_memory_of_the_peer_can_be_touched(engine: TransferEngine, make_peer: MakePeer) -> None:
    peer, data = make_peer(64 * KIB), pattern(64 * KIB)
    mine = address_of(data)
    write = engine.transfer_sync_write
    assert write(peer.name, mine, peer.memory - 1, 16) == -1
    assert write(peer.name, mine, peer.memory + 64 * KIB - 15, 16) == -1
    assert write(peer.name, mine, 0, 16) == -1
    assert write(peer.name, mine, peer.memory, -16) == -1
    assert write(peer.name, mine, peer.memory, 0) == 0
    assert write(peer.name, mine, peer.memory, 16) == 0
    assert peer.ask("unregister_memory", peer.memory) == 0
    assert write(peer.name, mine, peer.memory, 16) == -1  # by the handle that worked a moment ago
    assert peer.ask("register_memory", peer.memory, 32 * KIB) == 0
    assert write(peer.name, mine, peer.memory, 16) == 0
    assert write(peer.name, mine, peer.memory + 32 * KIB - 1, 16) == -1


def test_bad_pointers_and_lists_are_codes(engine: TransferEngine, make_peer: MakePeer) -> None:
    peer, data = make_peer(64 * KIB), pattern(64 * KIB)
    mine = address_of(data)
    for address in (0, 1, 8, 2**47 - 4096, 2**63):
        assert engine.transfer_sync_write(peer.name, address, peer.memory, 16) == -1
        assert engine.transfer_sync_read(peer.name, address, peer.memory, 16) == -1
        assert engine.register_memory(address, 16) == -1
        assert engine.write_bytes_to_buffer(address, b"x" * 16, 16) == -1
        with pytest.raises(ValueError):
            engine.read_bytes_from_buffer(address, 16)
    assert engine.batch_transfer_sync_write(peer.name, [mine], [peer.memory], []) == -1
    assert engine.batch_transfer_async_write(peer.name, [mine], [], [16]) == 0
    assert engine.batch_transfer_sync_write(peer.name, [], [], []) == 0
    assert engine.transfer_sync(peer.name, mine, peer.memory, 16, 7) == -1  # type: ignore[arg-type]
    assert engine.batch_register_memory([mine], []) == -1
    assert engine.register_memory(mine, 0) == -1
    assert engine.register_memory(mine, 64 * KIB, "cuda:0") == -1
    assert engine.register_memory(mine, 64 * KIB) == 0
    assert engine.register_memory(mine, 64 * KIB) == -7
    assert engine.register_memory(mine + 100, 16) == -7
    assert engine.unregister_memory(mine + 100) == -3
    assert engine.batch_unregister_memory([mine, 5]) == -3
    assert engine.unregister_memory(mine) == -3


def test_names_that_lead_nowhere(engine: TransferEngine) -> None:
    data = pattern(64)
    for name in ("127.0.0.1:1", "nobody", "", "127.0.0.1:notaport"):
        assert engine.transfer_sync_write(name, address_of(data), 4096, 64) == -1
        assert engine.transfer_submit_write(name, address_of(data), 4096, 64) == 0
        assert engine.get_first_buffer_address(name) == 0
    assert engine.send_probe("127.0.0.1:1") == -102
    assert engine.send_probe("nobody") == -101


def test_without_initialize_and_after_close() -> None:
    data = pattern(64)
    engine = TransferEngine()
    for _ in range(2):
        assert engine.get_rpc_port() == 0
        assert engine.register_memory(address_of(data), 64) == -1
        assert engine.transfer_sync_write("127.0.0.1:1", address_of(data), 4096, 64) == -1
        assert engine.batch_transfer_async_read("127.0.0.1:1", [address_of(data)], [4096], [64]) == 0
        assert engine.allocate_managed_buffer(64) == 0
        assert engine.free_managed_buffer(64, 64) == -1
        assert engine.send_probe("127.0.0.1:1") == -1
        assert engine.get_notifies() == []
        assert engine.get_batch_transfer_status([1]) == -1
        assert engine.initialize("127.0.0.1", P2P, "tcp", "") == 0
        engine.close()
        engine.close()
    assert engine.initialize("127.0.0.1", P2P, "xgmi", "") == -1
    assert engine.initialize("127.0.0.1", "127.0.0.1:2379", "tcp", "") == -1  # etcd, by upstream's rules
    assert engine.initialize("", P2P, "tcp", "") == -1
    assert engine.initialize("203.0.113.7", P2P, "tcp", "") == -1  # no address of this machine


def test_managed_buffers(engine: TransferEngine) -> None:
    addresses = [engine.allocate_managed_buffer(size) for size in (1, 8 * KIB, 9 * KIB, 3 * MIB)]
    assert all(addresses)
    assert len(set(addresses)) == 4
    assert engine.write_bytes_to_buffer(addresses[3], b"abcdef", 4) == 0
    assert engine.read_bytes_from_buffer(addresses[3], 4) == b"abcd"
    assert engine.write_bytes_to_buffer(addresses[3], b"abc", 4) == -1
    assert engine.unregister_memory(addresses[0]) == -3  # it is freed instead
    for address in addresses:
        assert engine.free_managed_buffer(address, 1) == 0
        assert engine.free_managed_buffer(address, 1) == -3
    own = f"127.0.0.1:{engine.get_rpc_port()}"
    assert engine.get_first_buffer_address(own) > 0
    assert engine.allocate_managed_buffer(2**62) == 0


@pytest.mark.parametrize("kind", ["plain", "managed"])
def test_a_peer_killed_during_transfers_is_an_error(engine: TransferEngine, make_peer: MakePeer, kind: str) -> None:
    peer, data = make_peer(64 * MIB, kind=kind), pattern(64 * MIB)
    moved = threading.Event()

    def write_until_it_fails() -> int:
        while True:
            code = engine.transfer_sync_write(peer.name, address_of(data), peer.memory, data.nbytes)
            if code:
                return code
            moved.set()

    with ThreadPoolExecutor(2) as threads:
        codes = [threads.submit(write_until_it_fails) for _ in range(2)]
        assert moved.wait(60)
        peer.kill()
        assert [code.result(60) for code in codes] == [-1, -1]
    assert engine.send_probe(peer.name) == -102
    assert engine.transfer_sync_read(peer.name, address_of(data), peer.memory, 64) == -1


def test_eight_threads(engine: TransferEngine, make_peer: MakePeer) -> None:
    peer = make_peer(8 * MIB)

    def work(number: int) -> bool:
        source, target, at = pattern(MIB, number), np.zeros(MIB, np.uint8), peer.memory + number * MIB
        codes = [engine.register_memory(address_of(source), MIB)]
        for turn in range(8):
            source += turn
            spans = [range(base, base + MIB, 64 * KIB) for base in (address_of(source), at, address_of(target))]
            sizes = [64 * KIB] * 16
            codes.append(engine.batch_transfer_sync_write(peer.name, spans[0], spans[1], sizes))
            batch = engine.batch_transfer_async_read(peer.name, spans[2], spans[1], sizes)
            codes.append(engine.get_batch_transfer_status([batch]))
            if not np.array_equal(source, target):
                return False
        return not any(codes)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))


def test_http_metadata_a_restarted_peer_is_found_again(make_peer: MakePeer) -> None:
    server = KVBootstrapServer(0)
    server.run()
    url, data = f"http://127.0.0.1:{server.port}/metadata", pattern(64 * KIB)
    engine = TransferEngine()
    try:
        assert engine.initialize("127.0.0.1:12001", url, "tcp", "") == 0
        first = make_peer(MIB, host="127.0.0.1:12002", metadata=url)
        assert engine.get_first_buffer_address("127.0.0.1:12002") == first.memory
        assert engine.transfer_sync_write(first.name, address_of(data), first.memory, data.nbytes) == 0
        rival = TransferEngine()
        assert rival.initialize("127.0.0.1:12002", url, "tcp", "") == -1  # that name is in use
        first.kill()
        assert engine.transfer_sync_write(first.name, address_of(data), first.memory, data.nbytes) == -1
        second = make_peer(MIB, host="127.0.0.1:12002", metadata=url)
        assert engine.transfer_sync_write(second.name, address_of(data), second.memory, data.nbytes) == 0
        assert second.ask("read_bytes_from_buffer", second.memory, 64) == data[:64].tobytes().hex()
        assert engine.send_probe("127.0.0.1:12003") == -200
    finally:
        engine.close()
        server.close()
    assert list(server.store) == ["mooncake/rpc_meta/127.0.0.1:12002"]


def test_a_secret_keeps_others_out(
    make_peer: MakePeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: TransferEngine
) -> None:
    secret, data = tmp_path / "secret", pattern(64)
    secret.write_text("a secret of more than 16 bytes")
    secret.chmod(0o600)
    peer = make_peer(MIB, kind="managed", env={"MOONPOOL_SECRET_FILE": str(secret)})
    assert engine.send_probe(peer.name) == -104
    assert engine.get_first_buffer_address(peer.name) == 0
    assert engine.transfer_sync_write(peer.name, address_of(data), peer.memory, 64) == -1
    monkeypatch.setenv("MOONPOOL_SECRET_FILE", str(secret))
    trusted = TransferEngine()
    assert trusted.initialize("127.0.0.1", P2P, "tcp", "") == 0
    assert trusted.transfer_sync_write(peer.name, address_of(data), peer.memory, 64) == 0
    trusted.close()


def test_what_this_machine_does_not_have(engine: TransferEngine) -> None:
    for name in (f"{batch}transfer_{op}_on_cuda" for batch in ("", "batch_") for op in ("read", "write")):
        assert hasattr(engine, name) == has_cuda()
    assert engine.get_engine() is not None
    assert engine.get_engine_ptr() == 0
    assert engine.warmup_efa_segment("x") == 0
    assert '"cpu:0"' in engine.get_local_topology()
    assert '"cpu:0"' in engine.get_local_topology("mlx5_0,mlx5_1")
