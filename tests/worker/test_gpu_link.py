"""KV between a GPU's pages, the pool and other processes' pages: `pytest -m gpu` on a machine with an NVIDIA GPU.

Bytes of pages are compared after every way. A bit that flips in the pool, in a page or on the way is found, counted and
never used. Processes that are killed in mid-transfer leave nothing behind.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import google_crc32c
import msgspec
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from gpu_child import NUM_PAGES
from gpu_kv import ALONE, BESIDE, KvSide, PoolProcess, equal_pages, fill_pages, keys_of, layout_of
from waiting import wait_until

from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import Corrupt
from moonpool.base.keys import object_key
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.kv_tensor import KvMemory
from moonpool.transfer.config import TransferConfig
from moonpool.transfer.engine import TransferEngine
from moonpool.transfer.transports.cuda.copy_stream import CopyStream
from moonpool.transfer.transports.cuda.driver import driver
from moonpool.worker.kv_link.decode_peers import DecodePeers
from moonpool.worker.kv_link.device_pieces import DevicePieces
from moonpool.worker.kv_link.pieces import Checksums
from moonpool.worker.kv_link.pool import PoolWriter
from moonpool.worker.kv_link.push import Push
from moonpool.worker.kv_link.send_queue import SendQueue
from moonpool.worker.messages import CommitHandoff, Ticket, TokenOut

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]
NUM_BLOCKS = 24
OURS, THEIRS = list(range(NUM_BLOCKS)), list(range(NUM_BLOCKS, 2 * NUM_BLOCKS))
CHILD = str(Path(__file__).with_name("gpu_child.py"))


class Lab:
    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir
        self.pool = PoolProcess(run_dir, 4 << 30)  # removed objects are leased for a while
        self.kv = KvMemory(layout_of(2 * NUM_BLOCKS), device="cuda")
        self.side = KvSide(run_dir, self.pool.address, self.kv)
        fill_pages(self.kv, OURS)
        self.number = 0

    def fresh_keys(self) -> list[bytes]:
        self.number += 1
        return keys_of(1000 + self.number, NUM_BLOCKS)

    def flip(self, page: int, layer: int) -> None:
        """Flip a bit of a piece, on the current stream."""
        self.kv.tensor.view(torch.int16)[page, layer].view(-1)[:1].bitwise_xor_(4)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(str(tmp_path_factory.mktemp("p")))
    made.side.page_lock()
    yield made
    made.side.close()
    made.pool.__exit__()


@pytest.mark.parametrize(
    "layout",
    [
        KvLayout(num_pages=5, num_layers=3, num_kv_heads=1, block_tokens=3, head_dim=2, dtype="float32"),
        KvLayout(num_pages=5, num_layers=2, num_kv_heads=5, block_tokens=16, head_dim=64, dtype="float16"),
        layout_of(3),
    ],
)
def test_checksums_are_those_of_google_crc32c(layout: KvLayout) -> None:
    kv = KvMemory(layout, device="cuda")
    kv.tensor.view(torch.uint8).random_(0, 256)
    pieces = DevicePieces(kv)
    raw = kv.tensor.view(torch.uint8).view(layout.num_pages, layout.num_layers, -1).cpu().numpy()
    for pages, layers in (([2, 0], range(layout.num_layers)), ([1], range(1, 2))):
        wanted = [[google_crc32c.value(raw[page, layer].tobytes()) for layer in layers] for page in pages]
        assert pieces.checksums(pages, layers, pieces.mark()).tolist() == wanted


@pytest.mark.parametrize("compute_s", [ALONE, BESIDE])
def test_bytes_are_equal_after_the_pool(lab: Lab, compute_s: float) -> None:
    keys = lab.fresh_keys()
    lab.side.put(keys, OURS)
    lab.kv.clear(THEIRS)
    lab.side.pull(keys, THEIRS, compute_s)
    assert equal_pages(lab.kv, OURS, THEIRS)
    lab.side.remove(keys)


@pytest.mark.parametrize("compute_s", [ALONE, BESIDE])
def test_bytes_are_equal_without_page_locked_memory(
    lab: Lab, compute_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = lab.fresh_keys()
    monkeypatch.setattr(lab.side.transfer, "pinning", None)
    lab.side.put(keys, OURS)
    lab.kv.clear(THEIRS)
    lab.side.pull(keys, THEIRS, compute_s)
    assert equal_pages(lab.kv, OURS, THEIRS)
    lab.side.remove(keys)


@pytest.mark.parametrize("compute_s", [ALONE, BESIDE])
def test_a_bit_that_flips_in_the_pool_is_found(lab: Lab, compute_s: float) -> None:
    keys = lab.fresh_keys()
    lab.side.put(keys, OURS)
    info = lab.side.store.lookup([object_key(keys[7])])[0]
    assert info is not None
    (segment,) = lab.side.pinned()
    with segment.copying():
        borrowed = segment._borrowed
        assert borrowed is not None
        at = info.replicas[0].offset + info.nbytes - 5  # in the last piece
        borrowed.memory[at] ^= 1
    before = lab.side.store.counters()
    result = lab.side.start_pull(keys, THEIRS, compute_s).wait_end(20)
    after = lab.side.store.counters()
    assert (result.num_good, type(result.failure)) == (7, Corrupt)
    assert equal_pages(lab.kv, OURS[:7], THEIRS[:7])
    assert after["corrupt_replicas"] - before["corrupt_replicas"] == 1
    assert lab.side.puller.count_stored(keys) == 7, "in quarantine"
    lab.side.remove(keys)


def test_a_bit_that_flips_in_a_page_after_its_checksum_is_found(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, checksums = lab.fresh_keys(), lab.side.pieces.checksums

    def checksums_then_flip(*args: Any) -> Checksums:
        found = checksums(*args)
        lab.flip(5, 3)
        torch.cuda.synchronize()
        return found

    monkeypatch.setattr(lab.side.pieces, "checksums", checksums_then_flip)
    lab.side.put(keys, OURS)
    monkeypatch.undo()
    lab.flip(5, 3)
    result = lab.side.start_pull(keys, THEIRS).wait_end(20)
    assert (result.num_good, type(result.failure)) == (5, Corrupt)
    lab.side.remove(keys)


@pytest.mark.parametrize("compute_s", [ALONE, BESIDE])
def test_a_bit_that_flips_on_the_way_is_found(lab: Lab, compute_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, start_reads, flips = lab.fresh_keys(), CopyStream.start_reads, [1]
    lab.side.put(keys, OURS)

    def flip_behind(stream: CopyStream, *args: Any) -> None:
        start_reads(stream, *args)
        if flips:
            flips.clear()
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)):  # type: ignore[no-untyped-call]
                lab.flip(THEIRS[3], 0)

    monkeypatch.setattr(CopyStream, "start_reads", flip_behind)
    before = lab.side.store.counters()
    result = lab.side.start_pull(keys, THEIRS, compute_s).wait_end(20)
    after = lab.side.store.counters()
    assert after["damaged_copies"] - before["damaged_copies"] == 1
    assert after["corrupt_replicas"] == before["corrupt_replicas"], "the replica is right"
    assert result.num_good in (3, NUM_BLOCKS), "computed again, or read again before it was used"
    assert equal_pages(lab.kv, OURS[: result.num_good], THEIRS[: result.num_good])
    lab.side.pull(keys, THEIRS, compute_s)
    assert equal_pages(lab.kv, OURS, THEIRS)
    lab.side.remove(keys)


class Child:
    def __init__(self, *args: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, CHILD, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.first = self._process.stdout.readline()

    def ask(self) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Calls:
    """The connection to the decode worker: takes every call."""

    def __init__(self) -> None:
        self.commits: list[CommitHandoff] = []

    def open(self, address: str, call: object) -> Future[Calls]:
        return self.call(self, call)

    def call(self, client: Calls, call: object) -> Future[Calls]:
        if isinstance(call, CommitHandoff):
            self.commits.append(call)
        answered: Future[Calls] = Future()
        answered.set_result(self)
        return answered


class NoPool:
    max_pieces = 1 << 20

    def begin(self, *_: object) -> dict[bytes, object]:
        return {}

    def write(self, *_: object) -> set[object]:
        return set()


def hand_off(lab: Lab, child: Child, transfer: TransferEngine) -> tuple[CommitHandoff, list[int]]:
    """Hand 10 pages over, as a prefill worker does; return the commit and the child's pages."""
    pages = [11, 2, 7, 0, 15, 4, 9, 1, 13, 6]
    ticket = Ticket(
        request_id="r",
        epoch=1,
        address="unix:/none",
        segment=msgspec.json.decode(child.first, type=SegmentDescriptor),
        pages=pages,
        num_present_blocks=0,
        generation=5,
    )
    queue, calls, outcomes = SendQueue(), Calls(), list[object]()
    push = Push(
        ticket,
        [],
        queue=queue,
        memory=lab.side.pieces,
        pool=cast(PoolWriter, NoPool()),
        peers=cast(DecodePeers, calls),
        transfer=transfer,
    )
    push.begin(OURS[: len(pages)], 0, 0)
    for layer in range(lab.kv.layout.num_layers):
        push.layer_ready(layer, range(len(pages)))
    push.commit(TokenOut(1), 11, outcomes.append)
    queue.close(20)
    assert outcomes == [None]
    return calls.commits[0], pages


def test_pages_go_to_another_process_s_gpu_memory_and_its_end_frees_them(lab: Lab) -> None:
    gpu = driver().device_of(lab.kv.tensor.data_ptr())
    torch.cuda.synchronize()
    before = gpu.free_nbytes()
    child = Child("serve", lab.run_dir)
    try:
        with TransferEngine(TransferConfig(run_dir=lab.run_dir)) as transfer:
            commit, pages = hand_off(lab, child, transfer)
            theirs = np.array(msgspec.json.decode(child.ask()), np.uint32)
            ours = lab.side.pieces.checksums(OURS[: len(pages)], range(lab.kv.layout.num_layers))
            assert np.array_equal(theirs[pages], ours)
            assert commit.checksums == ours.astype("<u4").tobytes()
            untouched = [page for page in range(NUM_PAGES) if page not in pages]
            assert len(np.unique(theirs[untouched])) == 1, "zeros"
            child.kill()  # while its memory is mapped here
            wait_until(lambda: gpu.free_nbytes() >= before - (64 << 20), "the GPU frees the memory of a dead process")
    finally:
        child.kill()


def pinned_pages() -> int | None:
    """Return how many pages are pinned for devices on this machine; None where the kernel does not count them."""
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    acquired, released = counts.get("nr_foll_pin_acquired"), counts.get("nr_foll_pin_released")
    return int(acquired) - int(released) if acquired and released else None


def test_processes_killed_in_mid_transfer_leave_nothing(lab: Lab) -> None:
    keys = keys_of(1, NUM_BLOCKS)
    lab.side.put(keys, OURS)
    gpu = driver().device_of(lab.kv.tensor.data_ptr())
    rng = random.Random(7)
    before, pinned = gpu.free_nbytes(), pinned_pages()
    for _ in range(3):
        child = Child("pull", lab.run_dir, lab.pool.address, str(NUM_BLOCKS))
        assert child.first == "ready\n"
        time.sleep(rng.uniform(0.01, 0.1))
        child.kill()
    wait_until(lambda: gpu.free_nbytes() >= before - (64 << 20), "GPU memory is free again")
    wait_until(lambda: pinned is None or (pinned_pages() or 0) <= pinned, "no memory stays page-locked")
    lab.kv.clear(THEIRS)
    lab.side.pull(keys, THEIRS)
    assert equal_pages(lab.kv, OURS, THEIRS)
    others = keys_of(2, NUM_BLOCKS)
    wait_until(lambda: _can_put(lab, others), "space of the dead is given back")


def _can_put(lab: Lab, keys: list[bytes]) -> bool:
    lab.side.remove(keys)
    lab.side.writer.failures.clear()
    lab.side.writer.put_pages({})
    try:
        lab.side.put(keys, OURS)
    except AssertionError:
        return False
    return True


def shared_nbytes() -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:"))
    return int(line.split()[1]) * 1024


def test_a_node_that_is_killed_gets_its_memory_back(tmp_path: Path) -> None:
    before = shared_nbytes()
    nbytes = 1 << 30
    pool = PoolProcess(str(tmp_path), nbytes)
    side = KvSide(str(tmp_path), pool.address, KvMemory(layout_of(2 * NUM_BLOCKS), device="cuda"))
    try:
        side.page_lock()
        keys = keys_of(1, NUM_BLOCKS)
        side.put(keys, OURS)
        assert shared_nbytes() - before > nbytes * 0.9
        job = side.start_pull(keys, THEIRS)
        pool.kill()
        wait_until(lambda: shared_nbytes() - before < nbytes * 0.1, "the memory of the dead node is locked no more")
        result = job.wait_end(20)
        assert result.num_good in range(NUM_BLOCKS + 1)
    finally:
        side.close()
