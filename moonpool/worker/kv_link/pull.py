"""Pool -> pages, layer by layer, while the model computes. On a GPU the device copies and verifies: device_pull.py.

A pull never fails a request and never lets a wrong byte through: the first block that is gone, belongs to another model
or does not match its checksum ends the good prefix, and the engine computes the rest. A pull that is too late is left
behind: it may still write to its pages, so they are not reused before it has ended.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.errors import DeadlineExceeded, MoonpoolError
from moonpool.base.keys import object_key
from moonpool.engine.sequence import AdmittedSequence
from moonpool.store import Store
from moonpool.store.client.read_session import PendingPieces, ReadSession
from moonpool.store.messages import Promote
from moonpool.worker.kv_link.device_pieces import DevicePieces, PullLane
from moonpool.worker.kv_link.device_pull import DevicePull, goes_by_layer
from moonpool.worker.kv_link.pieces import HostPieces, PieceMemory, ReadyPoint
from moonpool.worker.kv_link.pool import PoolHealth
from moonpool.worker.kv_link.pull_job import PullJob, PullResult, StoredBlocks

_BUNDLE_NBYTES = 2 * 1024 * 1024  # read together, in the time that the pool has for one answer
_NUM_UNDER_WAY = 4  # bundles of one job
_EXPECTED_NBYTES_PER_S = 40e9  # to a GPU, before the first pull


class Puller:
    """Runs pull jobs on its own threads. `identity` is the digest that blocks must have."""

    def __init__(
        self,
        store: Store,
        memory: PieceMemory,
        identity: bytes,
        *,
        num_threads: int = 2,
        health: PoolHealth | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._store = store
        self._memory = memory
        self._identity = identity
        self._health = health or PoolHealth()
        self._clock: Clock = clock or SystemClock()
        self._slow = PoolHealth(self._health.rest_s, clock)  # of pulls alone: puts go on
        self._nbytes_per_s = _EXPECTED_NBYTES_PER_S  # of the last pull
        self._has_seen_ssd = False  # some block was on SSD alone
        self._lanes: list[PullLane] = []  # not in use
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="pull")
        self._answer_thread = ThreadPoolExecutor(1, thread_name_prefix="pull-answer")
        self._promote_thread = ThreadPoolExecutor(1, thread_name_prefix="promote")  # short calls: they wait for no pull

    @property
    def piece_nbytes(self) -> int:
        """Return the size of one piece, the least that a pull moves."""
        return self._memory.layout.piece_nbytes

    @property
    def page_nbytes(self) -> int:
        return self._memory.layout.page_nbytes

    @property
    def num_layers(self) -> int:
        return self._memory.layout.num_layers

    def count_stored(self, keys: list[bytes]) -> int:
        """Return how many leading blocks the pool holds now; 0 when it cannot be asked. Blocks the calling thread."""
        if self.is_resting:
            return 0
        try:
            # The pull looks the blocks up again, and that look-up counts as their use.
            found = self._store.lookup([object_key(key) for key in keys], prefix=True, reads=False)
        except MoonpoolError as error:
            self._health.record_error(error)
            return 0  # a pool that is away is a miss; the store client counts the error
        num_found = next((i for i, info in enumerate(found) if info is None), len(found))
        if not self._has_seen_ssd:
            is_memory = self._store.directory.is_memory
            self._has_seen_ssd = any(info is not None and not is_memory(info.replicas[0]) for info in found[:num_found])
        return num_found

    @property
    def promotes(self) -> bool:
        """Whether `promote` may help: some block was on SSD alone, and the pool does not rest."""
        return self._has_seen_ssd and not self.is_resting

    def promote(self, keys: Sequence[bytes]) -> None:
        """Ask the pool to bring those of these blocks that are on SSD to memory, because a prompt that waits will pull
        them. Return at once."""
        if self.promotes:
            self._promote_thread.submit(self._promote, [object_key(key) for key in keys])

    def _promote(self, names: list[bytes]) -> None:
        try:
            self._store.master.call_once(Promote(keys=names))
        except MoonpoolError as error:
            self._health.record_error(error)

    @property
    def is_resting(self) -> bool:
        """True while nothing should be pulled: the pool missed a deadline, or a pull took too long, a moment ago."""
        return self._health.is_resting or self._slow.is_resting

    def rest(self) -> None:
        """Start no pull for a while, because one took too long, even if the conductor asks for it."""
        self._slow.record_error(DeadlineExceeded("a pull took longer than computing would have"))

    def start(
        self,
        admitted: AdmittedSequence,
        on_end: Callable[[], None],
        compute_s: float = math.inf,
        layers: range | None = None,
        on_layers: Callable[[int], None] = lambda _: None,
        is_answer: bool = False,
    ) -> PullJob:
        """Start a pull, of all layers or of these. `on_end` is called when the puller no longer writes to the pages,
        `on_layers` as PullJob says; both run on a thread of the puller. `compute_s` is about how long a step computes
        beside the pull. Pulls of answers have a thread of their own, so that they delay no prompt.
        """
        memory = self._memory
        compute_after = memory.compute_after if isinstance(memory, DevicePieces) else None
        job = PullJob(admitted, on_end, layers or range(memory.layout.num_layers), on_layers, compute_after)
        # Earlier steps may still use these pages.
        threads = self._answer_thread if is_answer else self._threads
        threads.submit(self._run, job, memory.mark(), compute_s)
        return job

    def close(self) -> None:
        """Wait for running jobs. Idempotent."""
        for threads in (self._threads, self._answer_thread, self._promote_thread):
            threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: PullJob, after: ReadyPoint | None, compute_s: float) -> None:
        job.began_s = started_s = self._clock.now_s()
        if job.left_behind:
            job.end(PullResult(0, 0, 0.0))
            return
        sessions: list[ReadSession] = []
        layers_s: list[float] = []
        failure: MoonpoolError | None = None
        try:
            if isinstance(self._memory, DevicePieces):
                sessions, failure = self._pull_to_device(job, self._memory, after, compute_s)
            else:
                assert isinstance(self._memory, HostPieces)
                sessions, failure = self._pull_to_host(job, self._memory, started_s, layers_s)
        except MoonpoolError as error:
            sessions, failure = [], error
        except BaseException as error:
            job.end(PullResult(0, 0, 0.0, MoonpoolError(f"bug in a pull: {error!r}")))
            raise
        self._health.record_error(failure)
        block_nbytes = self._memory.layout.piece_nbytes * len(job.layers)
        num_ssd = sum(each.is_on_disk for each in sessions)
        num_remote = sum(each.is_remote and not each.is_on_disk for each in sessions)
        nbytes = len(sessions) * block_nbytes
        seconds = self._clock.now_s() - started_s
        if sessions:
            self._nbytes_per_s = nbytes / max(seconds, 1e-9)
        ssd_nbytes = num_ssd * block_nbytes
        nodes = {each.node for each in sessions}
        job.end(
            PullResult(
                len(sessions),
                nbytes,
                seconds,
                failure,
                ssd_nbytes,
                num_ssd,
                num_remote,
                nodes.pop() if len(nodes) == 1 else "",
                bool(sessions) and not any(each.is_remote for each in sessions),
                tuple(layers_s),
            )
        )

    def _pull_to_host(
        self, job: PullJob, memory: HostPieces, started_s: float, layers_s: list[float]
    ) -> tuple[list[ReadSession], MoonpoolError | None]:
        """Fill the pages. Return the sessions whose blocks are whole and right, and why not all are. Add to `layers_s`
        when each layer was in place, in seconds after `started_s`."""
        blocks = StoredBlocks(self._store, job.admitted.keys, self._identity, memory.layout)
        sessions = blocks.open(len(blocks))
        stream = _PieceStream(
            job, sessions, self._store, memory, lambda: layers_s.append(self._clock.now_s() - started_s)
        )
        stream.run()
        if job.left_behind:
            return [], blocks.failure
        return blocks.finish(sessions[: stream.num_good], stream.failure)

    def _pull_to_device(
        self, job: PullJob, memory: DevicePieces, after: ReadyPoint | None, compute_s: float
    ) -> tuple[list[ReadSession], MoonpoolError | None]:
        blocks = StoredBlocks(self._store, job.admitted.keys, self._identity, memory.layout)
        pull_s = len(blocks) * memory.layout.piece_nbytes * len(job.layers) / self._nbytes_per_s
        with self._lane(memory) as lane:
            pull = DevicePull(job, blocks, self._store, memory, lane, by_layer=goes_by_layer(pull_s, compute_s))
            return pull.run(after)

    @contextmanager
    def _lane(self, memory: DevicePieces) -> Iterator[PullLane]:
        """Streams for one job; there are at most as many lanes as threads."""
        lane = self._lanes.pop() if self._lanes else memory.new_lane()
        try:
            yield lane
        finally:
            self._lanes.append(lane)


class _Bundle(NamedTuple):
    """Pieces of one layer that are read together."""

    layer: int
    blocks: range
    is_last: bool  # of its layer
    reads: PendingPieces | None  # None: it has no blocks


class _PieceStream:
    """The pieces of one job, layer after layer. While one bundle is checked, the next ones are under way, so that the
    link does not idle.
    """

    def __init__(
        self,
        job: PullJob,
        sessions: Sequence[ReadSession],
        store: Store,
        memory: HostPieces,
        on_layer: Callable[[], None],
    ) -> None:
        self._job, self._sessions, self._store, self._memory = job, sessions, store, memory
        self._on_layer = on_layer
        self._under_way: deque[_Bundle] = deque()
        self.num_good = len(sessions)  # leading blocks of which no piece has failed so far
        self.failure: MoonpoolError | None = None  # of the first block that is not whole

    def run(self) -> None:
        """Read until all layers of the job are in place or the job is left behind. When this returns or raises, nothing
        is written to the pages any more.
        """
        layout, num_blocks = self._memory.layout, len(self._sessions)
        step = max(1, _BUNDLE_NBYTES // layout.piece_nbytes)
        bundles = [range(first, min(first + step, num_blocks)) for first in range(0, num_blocks, step)] or [range(0)]
        try:
            for layer, blocks in itertools.product(self._job.layers, bundles):
                self._start(layer, range(blocks.start, min(blocks.stop, self.num_good)), blocks is bundles[-1])
                if len(self._under_way) == _NUM_UNDER_WAY:
                    self._finish_first()
                if self._job.left_behind:
                    return
            while self._under_way and not self._job.left_behind:
                self._finish_first()
        finally:
            for bundle in self._under_way:
                if bundle.reads is not None:
                    bundle.reads.cancel()

    def _start(self, layer: int, blocks: range, is_last: bool) -> None:
        pages = self._job.admitted.pages
        wanted = [(self._sessions[block], layer, self._memory.piece(pages[block], layer)) for block in blocks]
        reads = self._store.piece_reads.start(wanted, num_ahead=len(self._under_way)) if wanted else None
        self._under_way.append(_Bundle(layer, blocks, is_last, reads))

    def _finish_first(self) -> None:
        layer, blocks, is_last, reads = self._under_way[0]
        errors = reads.finish() if reads is not None else []
        self._under_way.popleft()
        num_right = next((at for at, error in enumerate(errors) if error is not None), len(errors))
        for block in blocks[:num_right]:
            self._job.moved(self._memory.layout.piece_nbytes, self._sessions[block].is_on_disk)
        if num_right < len(errors) and blocks[num_right] < self.num_good:
            self.num_good, self.failure = blocks[num_right], errors[num_right]
        if is_last:
            self._on_layer()
            self._job.pass_on(range(layer, layer + 1), range(self.num_good))
            self._job.layers_done(range(layer, layer + 1))
