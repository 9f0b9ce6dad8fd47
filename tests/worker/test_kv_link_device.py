"""Blocks between a real pool and pages of a GPU in main memory (fake_gpu.py): what is copied, verified and told."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_gpu import FakeDevice, FakeDevicePieces, FakeReady, gpu
from store_pool import LocalPool

from moonpool.base.clock import SystemClock
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import Corrupt, NotFound, StaleGeneration
from moonpool.base.keys import chain_keys, object_key
from moonpool.base.object_header import unpack
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.sequence import AdmittedSequence, FullBlock
from moonpool.store import Store
from moonpool.transfer import Pending, TransferRequest
from moonpool.transfer.memory.buffers import DeviceSpan
from moonpool.transfer.memory.segment import Borrowed
from moonpool.transfer.transports.cuda.pinning import PinnedSegment, Pinning
from moonpool.worker.kv_link import device_pull
from moonpool.worker.kv_link.device_probe import DeviceProbe
from moonpool.worker.kv_link.device_pull import goes_by_layer
from moonpool.worker.kv_link.pool import PoolWriter
from moonpool.worker.kv_link.pull import Puller
from moonpool.worker.kv_link.pull_job import PullJob, PullResult
from moonpool.worker.kv_link.push import Push
from moonpool.worker.kv_link.send_queue import SendQueue
from moonpool.worker.messages import CommitHandoff, Ticket, TokenOut

__all__ = ["gpu"]
IDENTITY = bytes(range(32))
NUM_BLOCKS = 6
LAYOUT = KvLayout(num_pages=16, num_layers=3, num_kv_heads=1, block_tokens=4, head_dim=8, dtype="float32")
ALONE, BESIDE = 0.0, 1e9  # seconds that the step computes beside the pull
_ROOTS = itertools.count(1)


class Bench:
    """Pages 0 to 5 hold blocks that are in the pool; they are pulled to pages 8 to 13."""

    def __init__(self, pool: LocalPool, device: FakeDevice) -> None:
        self.pool, self.device = pool, device
        self.store: Store = pool.client()
        self.pieces = FakeDevicePieces(LAYOUT, device)
        self.pieces.content[:NUM_BLOCKS] = np.random.default_rng(3).integers(
            0, 256, self.pieces.content[:NUM_BLOCKS].shape
        )
        root = next(_ROOTS).to_bytes(32)
        self.keys = chain_keys(root, range(NUM_BLOCKS * LAYOUT.block_tokens), LAYOUT.block_tokens)
        self.writer = PoolWriter(self.store, self.pieces, IDENTITY)
        self.layers: list[tuple[range, range]] = []

    def pin(self) -> None:
        engine = self.store.directory.engine
        engine.pinning = Pinning(self.device, chunk_nbytes=1 << 20)
        self.store.page_lock_local()
        for _ in range(1000):
            if sum(self.device.locked.values()) == self.pool.nodes[0].segment.nbytes:
                return
            time.sleep(0.005)
        raise AssertionError("the pool was not page-locked")

    def put(self) -> None:
        self.writer.put_pages({page: FullBlock("r", page, page, key) for page, key in enumerate(self.keys)})
        assert self.writer.failures == {}

    def start(self, puller: Puller, compute_s: float, layers: range | None = None) -> PullJob:
        pages = tuple(range(8, 8 + NUM_BLOCKS))
        admitted = AdmittedSequence("r", 0, tuple(range(NUM_BLOCKS)), pages, tuple(self.keys))
        job = puller.start(admitted, lambda: None, compute_s, layers=layers)
        job.listen(lambda *told: self.layers.append(told[:2]))
        return job

    def pull(self, compute_s: float = ALONE, layers: range | None = None) -> PullResult:
        puller = Puller(self.store, self.pieces, IDENTITY)
        job = self.start(puller, compute_s, layers)
        for layer in layers or range(LAYOUT.num_layers):
            job.wait_layer(layer, 5)
        result = job.wait_end(5)
        puller.close()
        return result

    def check(self, num_good: int) -> None:
        assert np.array_equal(self.pieces.content[8 : 8 + num_good], self.pieces.content[:num_good])

    def damage_replica(self, block: int, layer: int) -> None:
        info = self.store.lookup([object_key(self.keys[block])])[0]
        assert info is not None
        memory = self.pool.nodes[0].segment.memory[info.replicas[0].offset :]
        memory[unpack(memory).piece_offset(layer)] ^= 1

    def damage_in_flight(self, block: int, layer: int) -> None:
        """Let one bit of the piece arrive wrong, once."""
        (address,) = self.pieces.addresses([8 + block], layer).tolist()

        def flip(target: int, nbytes: int) -> None:
            if target <= address < target + nbytes:
                ctypes.c_ubyte.from_address(address).value ^= 4
                self.device.after_copy = None

        self.device.after_copy = flip


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    pool = LocalPool(tmp_path_factory.mktemp("p"), dram_nbytes=4 << 20)
    yield pool
    pool.close()


@pytest.fixture
def bench(pool: LocalPool, gpu: FakeDevice) -> Iterator[Bench]:
    made = Bench(pool, gpu)
    yield made
    pinning = made.store.directory.engine.pinning
    if pinning is not None:
        pinning.close()
        made.store.directory.engine.pinning = None
    made.store.close()


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("compute_s", [ALONE, BESIDE])
def test_the_bytes_come_back(bench: Bench, pinned: bool, compute_s: float) -> None:
    if pinned:
        bench.pin()
    bench.put()
    assert bench.device.num_copies == (NUM_BLOCKS if pinned else 0), "whole blocks, straight into the pool"
    bench.device.num_copies = 0
    result = bench.pull(compute_s)
    assert (result.num_good, result.failure, result.nbytes) == (NUM_BLOCKS, None, NUM_BLOCKS * LAYOUT.page_nbytes)
    per_block = LAYOUT.num_layers if compute_s else 1
    together = LAYOUT.num_layers // per_block
    assert bench.layers == [
        (range(first, first + together), range(NUM_BLOCKS)) for first in range(0, LAYOUT.num_layers, together)
    ]
    assert bench.device.num_copies == (NUM_BLOCKS * per_block if pinned else 0)
    assert len(bench.pieces.waited_for) == LAYOUT.num_layers
    bench.check(NUM_BLOCKS)
    assert bench.store.counters()["bytes_read"] >= NUM_BLOCKS * LAYOUT.page_nbytes
    assert bench.store.counters()["damaged_copies"] == 0


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("compute_s", [ALONE, BESIDE])
@pytest.mark.parametrize("layers", [range(2), range(2, 3), range(1, 3)])
def test_some_layers_come_alone(bench: Bench, pinned: bool, compute_s: float, layers: range) -> None:
    """As a stage of a pipeline pulls them: other layers are neither copied nor checked."""
    if pinned:
        bench.pin()
    bench.put()
    bench.damage_replica(1, next(layer for layer in range(LAYOUT.num_layers) if layer not in layers))
    result = bench.pull(compute_s, layers)
    nbytes = NUM_BLOCKS * len(layers) * LAYOUT.piece_nbytes
    assert (result.num_good, result.failure, result.nbytes) == (NUM_BLOCKS, None, nbytes)
    assert [layer for told, _ in bench.layers for layer in told] == list(layers)
    content = bench.pieces.content.reshape(LAYOUT.num_pages, LAYOUT.num_layers, -1)
    for layer in range(LAYOUT.num_layers):
        wanted = content[:NUM_BLOCKS, layer] if layer in layers else np.zeros_like(content[:NUM_BLOCKS, layer])
        assert np.array_equal(content[8 : 8 + NUM_BLOCKS, layer], wanted)
    bench.damage_replica(4, layers.stop - 1)
    assert bench.pull(compute_s, layers).num_good == 4


@pytest.mark.parametrize("compute_s", [ALONE, BESIDE])
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize(("block", "layer"), [(0, 0), (2, 1), (5, 2)])
def test_a_damaged_replica_ends_the_prefix_and_is_reported(
    bench: Bench, pinned: bool, compute_s: float, block: int, layer: int
) -> None:
    if pinned:
        bench.pin()
    bench.put()
    bench.damage_replica(block, layer)
    result = bench.pull(compute_s)
    assert (result.num_good, type(result.failure)) == (block, Corrupt)
    bench.check(block)
    assert bench.store.counters()["corrupt_replicas"] == 1
    found = bench.store.lookup([object_key(key) for key in bench.keys])
    assert [info is not None for info in found] == [n != block for n in range(NUM_BLOCKS)], "in quarantine"


@pytest.mark.parametrize("compute_s", [ALONE, BESIDE])
def test_bytes_that_change_on_their_way_are_found_and_never_used(
    bench: Bench, compute_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine was told of the block already, so it ends the prefix; its replica is not blamed."""
    bench.pin()
    bench.put()
    bench.damage_in_flight(2, 1)
    result = bench.pull(compute_s)
    assert (result.num_good, type(result.failure)) == (2, Corrupt)
    bench.check(2)
    counters = bench.store.counters()
    assert (counters["damaged_copies"], counters["corrupt_replicas"]) == (1, 0)
    again = bench.pull(compute_s)
    assert (again.num_good, again.failure) == (NUM_BLOCKS, None)
    bench.check(NUM_BLOCKS)


def test_a_block_that_the_engine_has_not_used_is_read_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_pull, "_FIRST_BLOCKS", 1)
    monkeypatch.setattr(device_pull, "_BUNDLE_BLOCKS", 1)
    monkeypatch.setattr(device_pull, "_NUM_UNDER_WAY", 1)
    bench.pin()
    bench.put()
    bench.damage_in_flight(2, 1)
    result = bench.pull()
    assert (result.num_good, result.failure) == (NUM_BLOCKS, None)
    bench.check(NUM_BLOCKS)
    assert bench.store.counters()["damaged_copies"] == 1


def test_a_block_that_is_gone_ends_the_prefix(bench: Bench) -> None:
    bench.pin()
    bench.put()
    bench.store.remove_many([object_key(bench.keys[3])], force=True)
    result = bench.pull()
    assert (result.num_good, type(result.failure)) == (3, NotFound)
    bench.check(3)


def test_space_that_is_reused_meanwhile_is_not_used(bench: Bench) -> None:
    """The generation is read again after the copies: what was copied right may be of another object by then."""
    bench.pin()
    bench.put()
    info = bench.store.lookup([object_key(bench.keys[4])])[0]
    assert info is not None
    at = info.replicas[0].offset
    memory = bench.pool.nodes[0].segment.memory

    def give_away(target: int, nbytes: int) -> None:
        memory[at + 24] ^= 1  # its generation, once all bytes have been copied

    puller = Puller(bench.store, bench.pieces, IDENTITY)
    lane_end = bench.pieces.addresses([8 + NUM_BLOCKS - 1], 0).tolist()[0]
    bench.device.after_copy = lambda target, nbytes: give_away(target, nbytes) if target == lane_end else None
    result = bench.start(puller, ALONE).wait_end(5)
    puller.close()
    memory[at + 24] ^= 1
    assert (result.num_good, type(result.failure)) == (4, StaleGeneration)


def the_pinned(bench: Bench) -> PinnedSegment:
    pinning = bench.store.directory.engine.pinning
    assert pinning is not None
    (pinned,) = pinning._segments.values()
    return pinned


def num_copying(pinned: PinnedSegment) -> int:
    return pinned._num_copying


def test_a_put_that_was_overtaken_fails(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence is asked again when the copies are over: another owner of the space must not be announced."""
    bench.pin()
    segment = bench.pool.nodes[0].segment
    fence = segment.fence
    assert fence is not None
    starts: list[int] = []

    def overtake(target: int, nbytes: int) -> None:
        pinned = the_pinned(bench)
        starts.append(target - pinned.address)
        if len(starts) == 2:
            fence.stamp(starts[-1], nbytes, 2**40)

    bench.device.after_copy = overtake
    bench.writer.put_pages({page: FullBlock("r", page, page, key) for page, key in enumerate(bench.keys)})
    bench.device.after_copy = None
    assert bench.writer.failures == {"stale_generation": 1}
    found = bench.store.lookup([object_key(key) for key in bench.keys])
    assert [info is not None for info in found] == [True, False, True, True, True, True]


def test_a_borrowed_segment_is_held_while_it_is_copied(bench: Bench) -> None:
    bench.pin()
    bench.put()
    pinned = the_pinned(bench)
    held: list[int] = []
    bench.device.after_copy = lambda target, nbytes: held.append(num_copying(pinned))
    assert bench.pull().num_good == NUM_BLOCKS
    assert set(held) == {1}
    assert num_copying(pinned) == 0
    assert isinstance(pinned.begin_copies(), Borrowed)
    pinned.end_copies()


def test_the_probe_measures_small_and_large_pulls_and_leaves_nothing(bench: Bench) -> None:
    bench.pin()
    scratch = FakeDevicePieces(replace(LAYOUT, num_pages=1), bench.device)
    before = set(bench.store.keys())
    samples = DeviceProbe(lambda: bench.pool.client(), scratch, SystemClock()).measure()
    assert [sample.nbytes for sample in samples] == [number * LAYOUT.page_nbytes for number in (1, 32, 128)]
    assert set(bench.store.keys()) == before


class Calls:
    """The connection to a decode worker that takes every call."""

    def __init__(self) -> None:
        self.commits: list[CommitHandoff] = []

    def open(self, address: str, call: object) -> Future[Calls]:
        return self.call(self, call)

    def call(self, line: Calls, call: object) -> Future[Calls]:
        if isinstance(call, CommitHandoff):
            self.commits.append(call)
        answered: Future[Calls] = Future()
        answered.set_result(self)
        return answered


class Peer:
    """A decode worker's segment that takes GPU memory, and the transfer engine."""

    takes_gpu_memory = True

    def __init__(self) -> None:
        self.memory = np.zeros(LAYOUT.total_nbytes, np.uint8)
        self.sizes: list[int] = []
        self.calls = Calls()

    def open(self, descriptor: SegmentDescriptor) -> Peer:
        return self

    def submit(self, requests: Sequence[TransferRequest], **_: object) -> Pending[None]:
        for request in requests:
            (span,) = request.buffers
            assert isinstance(span, DeviceSpan)
            ctypes.memmove(self.memory.ctypes.data + request.offset, span.address, span.nbytes)
            self.sizes.append(span.nbytes)
        done: Pending[None] = Pending()
        done.resolve(None)
        return done


class PutLog:
    max_pieces = 100

    def __init__(self) -> None:
        self.writes: list[tuple[range, int]] = []

    def begin(self, keys: Sequence[bytes], parents: object) -> dict[bytes, object]:
        return {key: key for key in keys}

    def write(self, pages: dict[object, int], layers: range, ready: object) -> set[object]:
        self.writes.append((layers, len(pages)))
        return set()

    def finish(self, sessions: object) -> None: ...


def hand_off(bench: Bench, num_keys: int, send: Callable[[Push], None]) -> tuple[Peer, PutLog]:
    """Hand pages 0 to 2 over to pages 9, 3 and 5 of a peer: `send` says what is ready, then all is committed."""
    peer, puts, queue = Peer(), PutLog(), SendQueue()
    bench.pieces.layer_run = 2
    segment = SegmentDescriptor(name="d/kv", nbytes=LAYOUT.total_nbytes, incarnation=1, host="", endpoints=())
    ticket = Ticket(
        request_id="r", epoch=1, address="", segment=segment, pages=[9, 3, 5], num_present_blocks=0, generation=1
    )
    parts: dict[str, Any] = {
        "queue": queue,
        "memory": bench.pieces,
        "pool": puts,
        "peers": peer.calls,
        "transfer": peer,
    }
    push, outcomes = Push(ticket, bench.keys[:num_keys], **parts), list[object]()
    send(push)
    push.commit(TokenOut(1), 12, outcomes.append)
    push.finish_puts(complete=True, on_done=lambda: None)
    queue.close(10)
    assert outcomes == [None]
    return peer, puts


def test_a_hand_off_sends_layers_together_and_puts_whole_blocks(bench: Bench) -> None:
    def send(push: Push) -> None:
        push.begin([0, 1, 2], 0, 0)
        for layer in range(LAYOUT.num_layers):
            push.layer_ready(layer, range(3), FakeReady())

    pieces, (peer, puts) = bench.pieces, hand_off(bench, 2, send)
    assert peer.sizes == [2 * LAYOUT.piece_nbytes] * 3 + [LAYOUT.piece_nbytes] * 3
    received = peer.memory.reshape(pieces.content.shape)
    assert np.array_equal(received[[9, 3, 5]], pieces.content[[0, 1, 2]])
    assert peer.calls.commits[0].checksums == pieces.checksums([0, 1, 2], range(3)).astype("<u4").tobytes()
    assert puts.writes == [(range(3), 2)], "once, when the last layer is computed, and full blocks only"


def test_blocks_that_are_whole_are_sent_whole(bench: Bench) -> None:
    """Those that were here before, and those that a pull brought at once."""

    def send(push: Push) -> None:
        push.begin([0, 1, 2], 1, 2)
        push.layers_ready(range(LAYOUT.num_layers), range(1, 3), FakeReady())

    pieces, (peer, _) = bench.pieces, hand_off(bench, 3, send)
    assert peer.sizes == [LAYOUT.page_nbytes] * 3
    assert np.array_equal(peer.memory.reshape(pieces.content.shape)[[9, 3, 5]], pieces.content[[0, 1, 2]])


def test_layer_by_layer_only_where_it_pays() -> None:
    assert goes_by_layer(pull_s=0.1, compute_s=0.2)
    assert not goes_by_layer(pull_s=0.1, compute_s=0.01)
