"""Pool -> pages, layer by layer, while the model computes.

A pull never fails a request and never lets a wrong byte through: the first block that is gone, belongs to another model
or does not match its checksum ends the good prefix, and the engine computes the rest. A pull that is too late is left
behind: it may still write to its pages, so they are not reused before it has ended.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.errors import Corrupt, DeadlineExceeded, MoonpoolError, NotFound
from moonpool.base.keys import object_key
from moonpool.base.object_header import ObjectHeader, ObjectKind
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.sequence import AdmittedSequence
from moonpool.store import Store
from moonpool.store.client.read_session import PendingPieces, ReadSession
from moonpool.worker.kv_link.pieces import PieceMemory
from moonpool.worker.kv_link.pool import PoolHealth

_BUNDLE_NBYTES = 2 * 1024 * 1024  # read together, in the time that the pool has for one answer
_NUM_UNDER_WAY = 4  # bundles of one job


@dataclass(frozen=True, slots=True)
class PullResult:
    """The first `num_good` blocks are in their pages, whole and verified. `failure` is why not all are."""

    num_good: int
    nbytes: int
    seconds: float
    failure: MoonpoolError | None = None
    ssd_nbytes: int = 0  # of `nbytes`, read from disk


LayerListener = Callable[[int, int], None]
"""Called with (layer, number of leading blocks whose piece of that layer is in place)."""


class PullJob:
    """One request's blocks on their way into pages. The engine's thread waits; the puller's threads call the rest."""

    def __init__(self, admitted: AdmittedSequence, on_layer: LayerListener, on_end: Callable[[], None]) -> None:
        self.admitted = admitted
        self.result: PullResult | None = None
        self.left_behind = False  # the engine has stopped waiting for it
        self.moved_nbytes = self.moved_ssd_nbytes = 0  # so far, as whole pieces
        self._on_layer = on_layer
        self._on_end = on_end
        self._num_layers = 0
        self._changed = threading.Condition()

    def wait_layer(self, layer: int, timeout_s: float) -> None:
        """Return when the layer's pieces are in place, the job is over (see `result`), or after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_layers > layer or self.result is not None, timeout_s)

    def wait_end(self, timeout_s: float) -> PullResult:
        """Return the outcome. If there is none in time, the job is left behind for good: `on_layer` is not called any
        more, and the pages stay the puller's until it calls `on_end`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.result is not None, timeout_s):
                self.left_behind = True
                self.result = PullResult(0, 0, timeout_s, DeadlineExceeded("the pool did not deliver in time"))
            assert self.result is not None
            return self.result

    def moved(self, nbytes: int, from_disk: bool) -> None:
        """Count a piece, on the job's thread; the engine's thread reads the sums when it gives the job up."""
        self.moved_nbytes += nbytes
        self.moved_ssd_nbytes += nbytes if from_disk else 0

    def layer_done(self, layer: int, num_good: int) -> None:
        with self._changed:
            self._num_layers = layer + 1
            self._changed.notify_all()
            if not self.left_behind:  # under the lock, so that no call follows once wait_end() has given up
                self._on_layer(layer, num_good)

    def end(self, result: PullResult) -> None:
        with self._changed:
            self.result = self.result or result
            self._changed.notify_all()
        self._on_end()


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
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="pull")

    @property
    def piece_nbytes(self) -> int:
        """Return the size of one piece, the least that a pull moves."""
        return self._memory.layout.piece_nbytes

    def count_stored(self, keys: list[bytes]) -> int:
        """Return how many leading blocks the pool holds now; 0 when it cannot be asked. Blocks the calling thread."""
        if self._health.is_resting or self._slow.is_resting:
            return 0
        try:
            # The pull looks the blocks up again, and that look-up counts as their use.
            found = self._store.lookup([object_key(key) for key in keys], prefix=True, reads=False)
        except MoonpoolError as error:
            self._health.record_error(error)
            return 0  # a pool that is away is a miss; the store client counts the error
        return next((i for i, info in enumerate(found) if info is None), len(found))

    def rest(self) -> None:
        """Start no pull for a while, because one took too long, even if the conductor asks for it."""
        self._slow.record_error(DeadlineExceeded("a pull took longer than computing would have"))

    def start(self, admitted: AdmittedSequence, on_layer: LayerListener, on_end: Callable[[], None]) -> PullJob:
        """Start a pull. `on_end` is called when the puller no longer writes to the pages. Both callbacks run on a
        thread of the puller.
        """
        job = PullJob(admitted, on_layer, on_end)
        self._threads.submit(self._run, job)
        return job

    def close(self) -> None:
        """Wait for running jobs. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: PullJob) -> None:
        started_s = self._clock.now_s()
        sessions: list[ReadSession] = []
        failure: MoonpoolError | None = None
        try:
            sessions, failure = self._open(job.admitted)
            sessions, failure = self._copy(job, sessions, failure)
        except MoonpoolError as error:
            sessions, failure = [], error
        except BaseException as error:
            job.end(PullResult(0, 0, 0.0, MoonpoolError(f"bug in a pull: {error!r}")))
            raise
        self._health.record_error(failure)
        page_nbytes = self._memory.layout.page_nbytes
        nbytes, ssd_nbytes = len(sessions) * page_nbytes, sum(each.is_on_disk for each in sessions) * page_nbytes
        job.end(PullResult(len(sessions), nbytes, self._clock.now_s() - started_s, failure, ssd_nbytes))

    def _open(self, admitted: AdmittedSequence) -> tuple[list[ReadSession], MoonpoolError | None]:
        """Look the blocks up again, because the promise may be old; the answer is leased. Return the sessions of the
        leading blocks that can be read, and why there are no more.
        """
        infos = self._store.lookup([object_key(key) for key in admitted.keys], prefix=True)
        stored = [info for info in infos if info is not None]  # the leading ones
        sessions: list[ReadSession] = []
        for session in self._store.piece_reads.open_many(stored, self._identity):
            if isinstance(session, MoonpoolError):
                return sessions, session
            try:
                _check_block(session.header, self._memory.layout)
            except MoonpoolError as error:
                return sessions, error
            sessions.append(session)
        return sessions, NotFound("the block has left the pool") if len(stored) < len(infos) else None

    def _copy(
        self, job: PullJob, sessions: list[ReadSession], failure: MoonpoolError | None
    ) -> tuple[list[ReadSession], MoonpoolError | None]:
        """Fill the pages. Return the sessions whose blocks are whole and right, and why not all are."""
        stream = _PieceStream(job, sessions, self._store, self._memory)
        stream.run()
        if job.left_behind:
            return [], failure
        failure, sessions = stream.failure or failure, sessions[: stream.num_good]
        for index, error in enumerate(self._store.piece_reads.finish(sessions)):
            if error is not None:
                return sessions[:index], error
        return sessions, failure


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

    def __init__(self, job: PullJob, sessions: Sequence[ReadSession], store: Store, memory: PieceMemory) -> None:
        self._job, self._sessions, self._store, self._memory = job, sessions, store, memory
        self._under_way: deque[_Bundle] = deque()
        self.num_good = len(sessions)  # leading blocks of which no piece has failed so far
        self.failure: MoonpoolError | None = None  # of the first block that is not whole

    def run(self) -> None:
        """Read until all layers are in place or the job is left behind. When this returns or raises, nothing is written
        to the pages any more.
        """
        layout, num_blocks = self._memory.layout, len(self._sessions)
        step = max(1, _BUNDLE_NBYTES // layout.piece_nbytes)
        bundles = [range(first, min(first + step, num_blocks)) for first in range(0, num_blocks, step)] or [range(0)]
        try:
            for layer, blocks in itertools.product(range(layout.num_layers), bundles):
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
        wanted = [(self._sessions[block], layer, self._memory.received(pages[block], layer)) for block in blocks]
        reads = self._store.piece_reads.start(wanted, num_ahead=len(self._under_way)) if wanted else None
        self._under_way.append(_Bundle(layer, blocks, is_last, reads))

    def _finish_first(self) -> None:
        layer, blocks, is_last, reads = self._under_way[0]
        errors = reads.finish() if reads is not None else []
        self._under_way.popleft()
        num_right = next((at for at, error in enumerate(errors) if error is not None), len(errors))
        right = blocks[:num_right]
        self._memory.apply_received([self._job.admitted.pages[block] for block in right], layer)
        for block in right:
            self._job.moved(self._memory.layout.piece_nbytes, self._sessions[block].is_on_disk)
        if num_right < len(errors) and blocks[num_right] < self.num_good:
            self.num_good, self.failure = blocks[num_right], errors[num_right]
        if is_last:
            self._job.layer_done(layer, self.num_good)


def _check_block(header: ObjectHeader, layout: KvLayout) -> None:
    """Raise Corrupt unless the object is one whole block with pieces of this worker's layout."""
    pieces = [piece.nbytes for piece in header.pieces]
    is_block = header.kind is ObjectKind.BLOCK and header.valid_tokens == layout.block_tokens
    if not is_block or pieces != [layout.piece_nbytes] * layout.num_layers:
        raise Corrupt(f"{header.key.hex()[:16]} is not a whole block of {layout.block_tokens} tokens")
