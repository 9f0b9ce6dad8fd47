"""Blocks from a real pool into pages: the good prefix is kept, whatever fails behind it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from store_pool import LocalPool
from waiting import HANG_S

from moonpool.base.errors import Corrupt, DeadlineExceeded, MoonpoolError, NotFound
from moonpool.base.keys import chain_keys, object_key
from moonpool.base.object_header import unpack
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.sequence import AdmittedSequence, FullBlock
from moonpool.store import Store
from moonpool.store.client.read_session import PendingPieces
from moonpool.worker.kv_link import pull as pull_module
from moonpool.worker.kv_link.pieces import HostPieces
from moonpool.worker.kv_link.pool import PoolWriter
from moonpool.worker.kv_link.pull import Puller
from moonpool.worker.kv_link.pull_job import PullJob, PullResult
from moonpool.worker.prefill import thinned

IDENTITY = bytes(range(32))
NUM_BLOCKS = 4
LAYOUT = KvLayout(num_pages=16, num_layers=3, num_kv_heads=1, block_tokens=4, head_dim=8, dtype="float32")
_ROOTS = itertools.count(1)


class Bench:
    """Pages 0 to 3 hold blocks that are in the pool; pages 8 to 11 are where they are pulled to."""

    def __init__(self, pool: LocalPool, store: Store) -> None:
        self.pool, self.store = pool, store
        self.memory = memoryview(bytearray(LAYOUT.total_nbytes))
        self.pieces = HostPieces(self.memory, LAYOUT)
        np.frombuffer(self.memory, dtype=np.uint8)[: 4 * LAYOUT.page_nbytes] = np.random.default_rng(3).integers(
            0, 256, 4 * LAYOUT.page_nbytes
        )
        root = next(_ROOTS).to_bytes(32)
        self.keys = chain_keys(root, range(NUM_BLOCKS * LAYOUT.block_tokens), LAYOUT.block_tokens)
        writer = PoolWriter(store, self.pieces, IDENTITY)
        writer.put_pages({page: FullBlock("r", page, page, key) for page, key in enumerate(self.keys)})
        assert writer.failures == {}
        self.layers: list[tuple[int, int]] = []
        self.ended = threading.Event()

    def pull(self, puller: Puller, layers: range | None = None) -> PullJob:
        pages = tuple(range(8, 8 + NUM_BLOCKS))
        admitted = AdmittedSequence("r", 0, tuple(range(NUM_BLOCKS)), pages, tuple(self.keys))

        def on_pieces(layers: range, blocks: range, _: object) -> None:
            self.layers += [(layer, len(blocks)) for layer in layers]

        job = puller.start(admitted, self.ended.set, layers=layers)
        job.listen(on_pieces)
        return job

    def page(self, page: int) -> bytes:
        return b"".join(bytes(self.pieces.piece(page, layer)) for layer in range(LAYOUT.num_layers))

    def check_pages(self, num_good: int) -> None:
        assert [self.page(8 + n) == self.page(n) for n in range(num_good)] == [True] * num_good

    def damage(self, block: int, layer: int) -> None:
        info = self.store.lookup([object_key(self.keys[block])])[0]
        assert info is not None
        memory = self.pool.nodes[0].segment.memory[info.replicas[0].offset :]
        memory[unpack(memory).piece_offset(layer)] ^= 1


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPool]:
    pool = LocalPool(tmp_path_factory.mktemp("p"), dram_nbytes=4 << 20)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def store(pool: LocalPool) -> Store:
    return pool.client()


@pytest.fixture
def bench(pool: LocalPool, store: Store) -> Bench:
    return Bench(pool, store)


@pytest.fixture
def puller(bench: Bench) -> Iterator[Puller]:
    puller = Puller(bench.store, bench.pieces, IDENTITY)
    yield puller
    puller.close()


def test_all_blocks_arrive_layer_by_layer(bench: Bench, puller: Puller) -> None:
    assert puller.count_stored(bench.keys) == NUM_BLOCKS
    result = bench.pull(puller).wait_end(5)
    assert (result.num_good, result.failure) == (NUM_BLOCKS, None)
    assert result.nbytes == NUM_BLOCKS * LAYOUT.page_nbytes
    assert bench.layers == [(0, NUM_BLOCKS), (1, NUM_BLOCKS), (2, NUM_BLOCKS)]
    assert len(result.layers_s) == LAYOUT.num_layers
    assert 0 < result.layers_s[0] <= result.layers_s[1] <= result.layers_s[2] <= result.seconds
    assert bench.ended.wait(HANG_S)
    bench.check_pages(NUM_BLOCKS)


@pytest.mark.parametrize("layers", [range(1), range(1, 3), range(1, 2)])
def test_some_layers_are_pulled_alone(bench: Bench, puller: Puller, layers: range) -> None:
    """As a stage of a pipeline does: the pieces of other layers are neither read nor written, nor checked."""
    other = next(layer for layer in range(LAYOUT.num_layers) if layer not in layers)
    bench.damage(2, other)
    read_nbytes = bench.store.counters()["bytes_read"]
    job = bench.pull(puller, layers)
    result = job.wait_end(5)
    assert (result.num_good, result.failure) == (NUM_BLOCKS, None)
    assert result.nbytes == NUM_BLOCKS * len(layers) * LAYOUT.piece_nbytes == job.moved_nbytes
    assert bench.store.counters()["bytes_read"] - read_nbytes == result.nbytes
    assert bench.layers == [(layer, NUM_BLOCKS) for layer in layers]
    assert len(result.layers_s) == len(layers)
    for block, layer in itertools.product(range(NUM_BLOCKS), range(LAYOUT.num_layers)):
        wanted = bytes(bench.pieces.piece(block, layer)) if layer in layers else bytes(LAYOUT.piece_nbytes)
        assert bytes(bench.pieces.piece(8 + block, layer)) == wanted


def test_a_damaged_piece_of_the_wanted_layers_ends_the_prefix(bench: Bench, puller: Puller) -> None:
    bench.damage(2, 1)
    result = bench.pull(puller, range(1, 3)).wait_end(5)
    assert result.num_good == 2
    assert isinstance(result.failure, MoonpoolError)


@pytest.mark.parametrize(
    ("num_layers", "kept"), [(0, []), (1, [0]), (32, list(range(32))), (33, None), (80, None), (1000, None)]
)
def test_the_times_of_many_layers_are_thinned(num_layers: int, kept: list[float] | None) -> None:
    found = list(thinned(tuple(range(num_layers))))
    if kept is not None:
        assert found == kept
    else:
        assert len(found) == 32
        assert found == sorted(set(found))
        assert found[-1] == num_layers - 1, "the last layer ends the pull"


@pytest.mark.parametrize("layer", range(LAYOUT.num_layers))
@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_damage_keeps_the_blocks_before_it(bench: Bench, puller: Puller, block: int, layer: int) -> None:
    bench.damage(block, layer)
    result = bench.pull(puller).wait_end(5)
    assert result.num_good == block
    assert isinstance(result.failure, Corrupt)
    assert result.nbytes == block * LAYOUT.page_nbytes
    counts = [NUM_BLOCKS] * layer + [block] * (LAYOUT.num_layers - layer)
    assert bench.layers == list(enumerate(counts)), "from the damaged layer on, no more than the good ones are told"
    assert bench.ended.wait(HANG_S)
    bench.check_pages(block)
    assert puller.count_stored(bench.keys) == block, "the damaged replica is in quarantine"


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_a_missing_block_ends_the_prefix(bench: Bench, puller: Puller, block: int) -> None:
    bench.store.remove_many([object_key(bench.keys[block])], force=True)
    result = bench.pull(puller).wait_end(5)
    assert result.num_good == block
    assert isinstance(result.failure, NotFound)
    bench.check_pages(block)


def test_blocks_of_another_model_are_not_read(bench: Bench) -> None:
    puller = Puller(bench.store, bench.pieces, bytes(32))
    result = bench.pull(puller).wait_end(5)
    puller.close()
    assert result.failure is not None
    assert (result.num_good, result.failure.code) == (0, "identity_mismatch")
    assert bench.page(8) == bytes(LAYOUT.page_nbytes)


def test_an_unreachable_pool_is_a_miss(bench: Bench, pool: LocalPool) -> None:
    client = pool.client()
    client.close()
    puller = Puller(client, bench.pieces, IDENTITY)
    assert puller.count_stored(bench.keys) == 0
    result = bench.pull(puller).wait_end(5)
    puller.close()
    assert result.num_good == 0
    assert result.failure is not None
    assert bench.ended.is_set()


class SlowReads:
    """Stops a pull when it has read a bundle, until that layer is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = [threading.Semaphore(0) for _ in range(LAYOUT.num_layers)]
        finish = PendingPieces.finish

        def finish_slowly(reads: PendingPieces) -> list[MoonpoolError | None]:
            errors = finish(reads)
            assert self.steps[reads._pieces[0][1].number].acquire(timeout=HANG_S)
            return errors

        monkeypatch.setattr(PendingPieces, "finish", finish_slowly)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowReads:
    return SlowReads(monkeypatch)


@pytest.fixture
def bundles_per_layer(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(pull_module, "_BUNDLE_NBYTES", 2 * LAYOUT.piece_nbytes)
    return NUM_BLOCKS // 2


def test_waiting_is_for_one_layer_at_a_time(
    bench: Bench, puller: Puller, slow: SlowReads, bundles_per_layer: int
) -> None:
    job = bench.pull(puller)
    assert not job.wait_layer(0, 0.01)
    assert bench.layers == []
    slow.steps[0].release(1)
    job.wait_layer(0, 0.05)
    assert bench.layers == [], "only one of the bundles is in place"
    slow.steps[0].release(1)
    assert job.wait_layer(0, HANG_S)
    assert bench.layers == [(0, NUM_BLOCKS)]
    assert job.wait_result(0.01) is None
    slow.steps[1].release(bundles_per_layer)
    assert job.wait_layer(1, HANG_S)
    assert job.result is None
    slow.steps[2].release(bundles_per_layer)
    assert job.wait_end(5).num_good == NUM_BLOCKS
    job.wait_layer(2, 0)


def test_who_listens_later_is_told_of_what_came_before(bench: Bench, puller: Puller, slow: SlowReads) -> None:
    told: list[int] = []
    layers: list[int] = []
    pages = tuple(range(8, 8 + NUM_BLOCKS))
    admitted = AdmittedSequence("r", 0, tuple(range(NUM_BLOCKS)), pages, tuple(bench.keys))
    job = puller.start(admitted, bench.ended.set, on_layers=layers.append)
    slow.steps[0].release(1)
    assert job.wait_layer(0, HANG_S)
    job.listen(lambda some, *_: told.extend(some))
    assert told == [0]
    slow.steps[1].release(1)
    assert job.wait_layer(1, HANG_S)
    job.listen(None)
    slow.steps[2].release(1)
    assert bench.ended.wait(HANG_S)
    assert (told, layers) == ([0, 1], [1, 2, 3])


def test_a_job_that_was_left_behind_before_it_began_reads_nothing(bench: Bench, puller: Puller) -> None:
    blocked = threading.Event()
    for _ in range(2):  # its threads
        puller._threads.submit(blocked.wait)
    read_nbytes = bench.store.counters()["bytes_read"]
    job = bench.pull(puller)
    assert job.wait_end(0.0).num_good == 0
    blocked.set()
    assert bench.ended.wait(HANG_S)
    assert bench.store.counters()["bytes_read"] == read_nbytes


def test_a_job_that_is_late_is_left_behind(
    bench: Bench, puller: Puller, slow: SlowReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards the engine is not told of layers, and the pull stops at its next layer instead of reading on."""
    monkeypatch.setattr(pull_module, "_NUM_UNDER_WAY", 1)
    job = bench.pull(puller)
    slow.steps[0].release(1)
    job.wait_layer(0, 5)
    result = job.wait_end(0.02)
    assert result.num_good == 0
    assert isinstance(result.failure, DeadlineExceeded)
    assert not bench.ended.wait(0.05), "the pages are still the puller's"
    slow.steps[1].release(1)
    assert bench.ended.wait(HANG_S), "it ends after the layer it was at"
    assert bench.layers == [(0, NUM_BLOCKS)]
    assert job.wait_end(0) == result, "and nothing makes it good again"
    slow.steps[2].release(100)
    puller.close()
    assert [bytes(bench.pieces.piece(8 + n, 2)) for n in range(NUM_BLOCKS)] == [bytes(LAYOUT.piece_nbytes)] * NUM_BLOCKS


def test_pieces_under_way_are_given_up_with_the_job(
    bench: Bench, puller: Puller, slow: SlowReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late job whose next layers are under way ends when none of them can be written to the pages any more."""
    cancelled: list[PendingPieces] = []
    cancel = PendingPieces.cancel

    def noted(reads: PendingPieces) -> None:
        cancel(reads)
        cancelled.append(reads)

    monkeypatch.setattr(PendingPieces, "cancel", noted)
    job = bench.pull(puller)
    job.wait_end(0.02)
    slow.steps[0].release(1)
    assert bench.ended.wait(HANG_S)
    assert len(cancelled) == LAYOUT.num_layers - 1
    assert all(reads._batch.done() for reads in cancelled)


def test_a_bug_ends_the_job(bench: Bench) -> None:
    class Broken(HostPieces):
        def piece(self, page: int, layer: int) -> memoryview:
            raise RuntimeError("oops")

    puller = Puller(bench.store, Broken(bench.memory, LAYOUT), IDENTITY)
    result = bench.pull(puller).wait_end(5)
    puller.close()
    assert result.num_good == 0
    assert "oops" in str(result.failure)
    assert bench.ended.is_set()


def test_jobs_do_not_wait_for_one_another(bench: Bench, store: Store, pool: LocalPool) -> None:
    others: Sequence[Bench] = [Bench(pool, store) for _ in range(3)]
    puller = Puller(bench.store, bench.pieces, IDENTITY, num_threads=2)
    jobs = [other.pull(puller) for other in others]
    assert [job.wait_end(5).num_good for job in jobs] == [NUM_BLOCKS] * 3
    puller.close()


def test_the_outcome_of_a_job_wakes_who_waits_for_a_layer() -> None:
    job = PullJob(AdmittedSequence("r", 0, (), (), ()), lambda: None, range(1))
    threading.Timer(0.01, job.end, [PullResult(0, 0, 0.0, NotFound("gone"))]).start()
    job.wait_layer(2, 5)
    assert job.result is not None
