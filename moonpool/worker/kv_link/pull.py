"""Pool -> pages, layer by layer, while the model computes.

A pull never makes a request fail and never lets a wrong byte through: blocks that are gone, belong to another
model or do not match their checksum end the good prefix there, and the engine computes the rest. A pull that is too
late is left behind: it may still write into its pages, so nobody else gets them before it says that it has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.errors import Corrupt, DeadlineExceeded, MoonpoolError, NotFound
from moonpool.base.keys import object_key
from moonpool.base.object_header import ObjectHeader, ObjectKind
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.step import AdmittedSequence
from moonpool.store.client import StoreClient
from moonpool.store.client.read_session import ReadSession
from moonpool.worker.kv_link.pieces import PieceMemory
from moonpool.worker.kv_link.pool_health import PoolHealth


@dataclass(frozen=True, slots=True)
class PullResult:
    """The first `num_good` blocks are in their pages, whole and verified. `failure` says why not all."""

    num_good: int
    nbytes: int
    seconds: float
    failure: MoonpoolError | None = None
    ssd_nbytes: int = 0  # of `nbytes`, read from disk


LayerListener = Callable[[int, int], None]
"""Called with (layer, number of leading blocks whose piece of that layer is in place)."""


class PullJob:
    """One request's blocks on their way into pages. Waiting is for the engine's thread, the rest for the puller's."""

    def __init__(self, admitted: AdmittedSequence, on_layer: LayerListener, on_end: Callable[[], None]) -> None:
        self.admitted = admitted
        self.result: PullResult | None = None
        self.left_behind = False  # the engine waits for it no more
        self.moved_nbytes = self.moved_ssd_nbytes = 0  # so far, as whole pieces
        self._on_layer = on_layer
        self._on_end = on_end
        self._num_layers = 0
        self._changed = threading.Condition()

    def wait_layer(self, layer: int, timeout_s: float) -> None:
        """Returns when the layer's pieces are in place or the job is over; look at `result` for the outcome."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_layers > layer or self.result is not None, timeout_s)

    def wait_end(self, timeout_s: float) -> PullResult:
        """The outcome. When there is none in time the job is left behind, for good: nobody hears of its layers any
        more, and the pages are the puller's until it has called `on_end`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.result is not None, timeout_s):
                self.left_behind = True
                self.result = PullResult(0, 0, timeout_s, DeadlineExceeded("the pool did not deliver in time"))
            assert self.result is not None
            return self.result

    def moved(self, nbytes: int, from_disk: bool) -> None:
        """Only the puller's thread counts; the engine's reads it when it gives the job up."""
        self.moved_nbytes += nbytes
        self.moved_ssd_nbytes += nbytes if from_disk else 0

    def layer_done(self, layer: int, num_good: int) -> None:
        with self._changed:
            self._num_layers = layer + 1
            self._changed.notify_all()
            if not self.left_behind:  # under the lock, so that nothing is told after wait_end has given up
                self._on_layer(layer, num_good)

    def end(self, result: PullResult) -> None:
        with self._changed:
            self.result = self.result or result
            self._changed.notify_all()
        self._on_end()


class Puller:
    """Runs pull jobs on its own threads. `identity` is the digest that blocks must carry."""

    def __init__(
        self,
        store: StoreClient,
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
        self._slow = PoolHealth(self._health.rest_s, clock)  # of pulls alone: what is put may still be worth it
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="pull")

    @property
    def piece_nbytes(self) -> int:
        """The least that a pull moves at once."""
        return self._memory.layout.piece_nbytes

    def count_stored(self, keys: list[bytes]) -> int:
        """How many leading blocks the pool holds now; 0 when it cannot be asked. Blocks while it asks."""
        if self._health.rests or self._slow.rests:
            return 0
        try:
            # The pull looks them up again, and that is the use which counts.
            found = self._store.lookup([object_key(key) for key in keys], prefix=True, reads=False)
        except MoonpoolError as error:
            self._health.note(error)
            return 0  # counted by the store client; a pool that is away is a miss
        return next((i for i, info in enumerate(found) if info is None), len(found))

    def rest(self) -> None:
        """A pull was given up for taking too long: start none for a while, whatever those who plan them believe."""
        self._slow.note(DeadlineExceeded("a pull took longer than computing would have"))

    def start(self, admitted: AdmittedSequence, on_layer: LayerListener, on_end: Callable[[], None]) -> PullJob:
        """`on_end` says that the puller no longer writes to the pages. Both are called on a puller's thread."""
        job = PullJob(admitted, on_layer, on_end)
        self._threads.submit(self._run, job)
        return job

    def close(self) -> None:
        """Waits for running jobs; idempotent."""
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
        self._health.note(failure)
        page_nbytes = self._memory.layout.page_nbytes
        nbytes, ssd_nbytes = len(sessions) * page_nbytes, sum(each.is_on_disk for each in sessions) * page_nbytes
        job.end(PullResult(len(sessions), nbytes, self._clock.now_s() - started_s, failure, ssd_nbytes))

    def _open(self, admitted: AdmittedSequence) -> tuple[list[ReadSession], MoonpoolError | None]:
        """Looks the blocks up again, because the promise may be old; the answer is leased."""
        sessions: list[ReadSession] = []
        for info in self._store.lookup([object_key(key) for key in admitted.keys], prefix=True):
            if info is None:
                return sessions, NotFound("the block has left the pool")
            try:
                session = self._store.open_read(info, self._identity)
                _check_block(session.header, self._memory.layout)
                sessions.append(session)
            except MoonpoolError as error:
                return sessions, error
        return sessions, None

    def _copy(
        self, job: PullJob, sessions: list[ReadSession], failure: MoonpoolError | None
    ) -> tuple[list[ReadSession], MoonpoolError | None]:
        for layer in range(self._memory.layout.num_layers):
            for index, session in enumerate(sessions):
                if job.left_behind:
                    return [], failure
                try:
                    page = job.admitted.pages[index]
                    self._memory.fill(page, layer, lambda view, s=session, n=layer: s.read_piece(n, view))  # type: ignore[misc]
                    job.moved(self._memory.layout.piece_nbytes, session.is_on_disk)
                except MoonpoolError as error:
                    sessions, failure = sessions[:index], error
                    break
            job.layer_done(layer, len(sessions))
        for index, session in enumerate(sessions):
            try:
                session.finish()
            except MoonpoolError as error:
                return sessions[:index], error
        return sessions, failure


def _check_block(header: ObjectHeader, layout: KvLayout) -> None:
    """Corrupt unless the object is one whole block with the pieces that our pages have."""
    pieces = [piece.nbytes for piece in header.pieces]
    is_block = header.kind is ObjectKind.BLOCK and header.valid_tokens == layout.block_tokens
    if not is_block or pieces != [layout.piece_nbytes] * layout.num_layers:
        raise Corrupt(f"{header.key.hex()[:16]} is not a whole block of {layout.block_tokens} tokens")
