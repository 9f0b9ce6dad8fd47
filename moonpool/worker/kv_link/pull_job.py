"""One pull as the engine sees it, and the blocks that it pulls as the store has them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moonpool.base.errors import Corrupt, DeadlineExceeded, MoonpoolError, NotFound
from moonpool.base.keys import object_key
from moonpool.base.object_header import HeaderFields, ObjectKind
from moonpool.engine.kv_memory import KvLayout
from moonpool.engine.sequence import AdmittedSequence
from moonpool.store import Store
from moonpool.store.client.read_session import ReadSession
from moonpool.worker.kv_link.pieces import ReadyPoint


@dataclass(frozen=True, slots=True)
class PullResult:
    """The first `num_good` blocks are in their pages, verified: all layers that were asked for. `failure` is why not
    all blocks are."""

    num_good: int
    nbytes: int
    seconds: float
    failure: MoonpoolError | None = None
    ssd_nbytes: int = 0  # of `nbytes`, read from disk
    num_ssd: int = 0  # of the good blocks, read from disk
    num_remote: int = 0  # of the good blocks, read from the memory of another machine
    node: str = ""  # of the pool that all good blocks came from; "": several
    is_near: bool = False  # all of them came from this machine
    layers_s: tuple[float, ...] = ()  # seconds after its start at which each layer was in place; empty on a GPU

    def behind(self, earlier: PullResult) -> PullResult:
        """Return this outcome with the blocks of an earlier pull for the same request counted."""
        return replace(self, num_ssd=self.num_ssd + earlier.num_ssd, num_remote=self.num_remote + earlier.num_remote)


PieceListener = Callable[[range, range, ReadyPoint | None], None]
"""Called with (layers, blocks) whose pieces are in place once the point is reached; blocks count from the first one of
the job. On a GPU they may turn out to be wrong later: what is made of them counts only if the result says that they
are good.
"""


class PullJob:
    """Some layers of one request's blocks on their way into pages. The engine's thread waits and listens; the puller's
    threads call the rest.

    On a GPU, `compute_after` lets the engine's stream wait for a point.
    """

    def __init__(
        self,
        admitted: AdmittedSequence,
        on_end: Callable[[], None],
        layers: range,
        on_layers: Callable[[int], None] = lambda _: None,
        compute_after: Callable[[ReadyPoint], None] | None = None,
    ) -> None:
        """`on_layers` is called with the layer before which all are in place, each time there are more."""
        self.admitted, self.layers = admitted, layers
        self._compute_after = compute_after
        self.result: PullResult | None = None
        self.left_behind = False  # the engine has stopped waiting for it
        self.moved_nbytes = self.moved_ssd_nbytes = 0  # so far, as whole pieces
        self.began_s: float | None = None  # None: it waits for a thread
        self._on_pieces: PieceListener | None = None
        self._passed: list[tuple[range, range, ReadyPoint | None]] = []  # what the listener is told of, or will be
        self._on_layers, self._on_end = on_layers, on_end
        self._num_layers = 0
        self._ready: dict[int, ReadyPoint] = {}  # by layer; on a GPU
        self._changed = threading.Condition()

    def listen(self, on_pieces: PieceListener | None) -> None:
        """Tell `on_pieces` of all pieces that are in place, and of the others when they come; None: of no more."""
        with self._changed:
            self._on_pieces = on_pieces
            if on_pieces is not None:
                for passed in self._passed:
                    on_pieces(*passed)

    def wait_layer(self, layer: int, timeout_s: float) -> bool:
        """Return True when the layer's pieces are in place or the job is over (see `result`), False after `timeout_s`.
        On a GPU they are in place when their copies are started, and what the engine computes from now on waits for
        them.
        """
        with self._changed:
            is_here = self._changed.wait_for(lambda: self._num_layers > layer or self.result is not None, timeout_s)
            ready = self._ready.get(layer)
        if ready is not None and self._compute_after is not None:
            self._compute_after(ready)
        return is_here

    def wait_result(self, timeout_s: float) -> PullResult | None:
        """Return the outcome; None if there is none in time, and the job goes on."""
        with self._changed:
            self._changed.wait_for(lambda: self.result is not None, timeout_s)
            return self.result

    def wait_end(self, timeout_s: float) -> PullResult:
        """Return the outcome. If there is none in time, the job is left behind for good: its listener is told of no
        more pieces, and the pages stay the puller's until it calls `on_end`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.result is not None, timeout_s):
                self.left_behind = True
                self.result = PullResult(0, 0, timeout_s, DeadlineExceeded("the pool did not deliver in time"))
            assert self.result is not None
            return self.result

    def moved(self, nbytes: int, from_disk: bool) -> None:
        """Count pieces, on the job's thread; the engine's thread reads the sums when it gives the job up."""
        self.moved_nbytes += nbytes
        self.moved_ssd_nbytes += nbytes if from_disk else 0

    def pass_on(self, layers: range, blocks: range, ready: ReadyPoint | None = None) -> None:
        """Tell the listener that these pieces are in place once `ready` is reached."""
        with self._changed:
            if self.left_behind:  # under the lock, so that no call follows once wait_end() has given up
                return
            self._passed.append((layers, blocks, ready))
            if self._on_pieces is not None:
                self._on_pieces(layers, blocks, ready)

    def layers_done(self, layers: range, ready: ReadyPoint | None = None) -> None:
        """Let the engine use these layers; on a GPU its computing waits for `ready`."""
        with self._changed:
            self._num_layers = layers.stop
            if ready is not None:
                self._ready |= dict.fromkeys(layers, ready)
            self._changed.notify_all()
        self._on_layers(layers.stop)

    def end(self, result: PullResult) -> None:
        with self._changed:
            self.result = self.result or result
            self._changed.notify_all()
        self._on_end()


class StoredBlocks:
    """The leading blocks of a prompt that the pool has, opened a few at a time. For one thread.

    The blocks are looked up again, because the promise may be old; the answer is leased. `failure` is why there are no
    more blocks than those that could be opened.
    """

    def __init__(self, store: Store, keys: Sequence[bytes], identity: bytes, layout: KvLayout) -> None:
        self._store, self._identity, self._layout = store, identity, layout
        infos = store.lookup([object_key(key) for key in keys], prefix=True)
        self._stored = [info for info in infos if info is not None]  # the leading ones
        self._num_opened = 0
        self.failure: MoonpoolError | None = None
        if len(self._stored) < len(infos):
            self.failure = NotFound("the block has left the pool")

    def __len__(self) -> int:
        return len(self._stored)

    def open(self, number: int) -> list[ReadSession]:
        """Return sessions of the next `number` blocks; fewer when one cannot be read, or none is left."""
        some = self._stored[self._num_opened : self._num_opened + number]
        sessions: list[ReadSession] = []
        for session in self._store.piece_reads.open_many(some, self._identity):
            try:
                if isinstance(session, MoonpoolError):
                    raise session
                _check_block(session.fields, self._layout)
            except MoonpoolError as error:
                self.failure = error
                self._stored = self._stored[: self._num_opened + len(sessions)]
                break
            sessions.append(session)
        self._num_opened += len(sessions)
        return sessions

    def finish(
        self, sessions: list[ReadSession], failure: MoonpoolError | None
    ) -> tuple[list[ReadSession], MoonpoolError | None]:
        """Return the leading sessions whose space was not reused meanwhile, and why there are no more of them.
        `failure` is why these are not all that were opened. Call it when the last byte has arrived.
        """
        for index, error in enumerate(self._store.piece_reads.finish(sessions)):
            if error is not None:
                return sessions[:index], error
        return sessions, failure or self.failure


def _check_block(header: HeaderFields, layout: KvLayout) -> None:
    """Raise Corrupt unless the object is one whole block with pieces of this worker's layout."""
    is_block = header.kind == ObjectKind.BLOCK and header.valid_tokens == layout.block_tokens
    if not is_block or header.sizes != (layout.piece_nbytes,) * layout.num_layers:
        raise Corrupt(f"{header.key.hex()[:16]} is not a whole block of {layout.block_tokens} tokens")
