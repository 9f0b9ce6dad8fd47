"""`mooncake.engine` with memory of a GPU: registered by pointer, moved to and from GPU and main memory of a peer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
from mooncake_peer import EnginePeer

from moonpool.integrations.mooncake.transfer_engine import MooncakeTransferEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
NBYTES = 200 * 1024 * 1024  # more than is staged at once


@pytest.fixture(scope="module", params=["gpu", "plain", "managed"])
def peer(request: pytest.FixtureRequest) -> Iterator[EnginePeer]:
    with tempfile.TemporaryDirectory(prefix="mp-peers-") as folder:
        made = EnginePeer(NBYTES, kind=request.param, env={"TMPDIR": folder})
        yield made
        made.close()


def test_gpu_memory_goes_there_and_back(peer: EnginePeer) -> None:
    import torch

    engine = MooncakeTransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    source = torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, device="cuda")
    target = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert engine.register_memory(source.data_ptr(), NBYTES, "cuda:0") == 0
    assert engine.register_memory(target.data_ptr(), NBYTES) == 0
    assert engine.register_memory(target.data_ptr(), NBYTES) == -7
    assert engine.transfer_sync_write(peer.name, source.data_ptr(), peer.memory, NBYTES) == 0
    assert peer.ask("read_bytes_from_buffer", peer.memory + 5, 64) == bytes(source[5:69].tolist()).hex()
    assert engine.transfer_sync_read(peer.name, target.data_ptr(), peer.memory, NBYTES) == 0
    assert torch.equal(source, target)
    host = torch.zeros(4096, dtype=torch.uint8)
    assert engine.transfer_sync_read(peer.name, host.data_ptr(), peer.memory, 4096) == 0
    assert torch.equal(host, source[:4096].cpu())
    assert engine.read_bytes_from_buffer(source.data_ptr(), 64) == bytes(source[:64].tolist())
    assert engine.write_bytes_to_buffer(target.data_ptr(), b"abc", 3) == 0
    assert bytes(target[:3].tolist()) == b"abc"
    engine.close()


def test_transfers_follow_the_work_of_a_stream(peer: EnginePeer) -> None:
    import torch

    engine = MooncakeTransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    stream, matrix = torch.cuda.Stream(), torch.rand(4096, 4096, device="cuda")  # type: ignore[no-untyped-call]
    value, back = (
        torch.zeros(1024, dtype=torch.uint8, device="cuda"),
        torch.zeros(1024, dtype=torch.uint8, device="cuda"),
    )
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            matrix = matrix @ matrix
        value += 7  # after the products
        engine.transfer_write_on_cuda(peer.name, value.data_ptr(), peer.memory, 1024, stream.cuda_stream)
        halves = [back.data_ptr(), back.data_ptr() + 512]
        there = [peer.memory, peer.memory + 512]
        engine.batch_transfer_read_on_cuda(peer.name, halves, there, [512, 512], stream.cuda_stream)
        doubled = back * 2
    stream.synchronize()
    assert doubled.tolist() == [14] * 1024
    with pytest.raises(RuntimeError):
        engine.transfer_read_on_cuda(peer.name, value.data_ptr(), 4096, 1024)
    engine.close()
