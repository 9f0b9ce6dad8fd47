"""The pool as a worker uses it: whether it is worth asking, how fast it is, and pages -> pool.

Puts are for later requests: a put that fails is counted, and the current request goes on. A pool that is gone fails at
once and costs nothing. A pool that hangs costs each caller the whole timeout, so after a missed deadline no call is
made for `rest_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.cluster import PullSample
from moonpool.base.errors import DeadlineExceeded, MoonpoolError, NotFound, Unauthorized, Unavailable
from moonpool.base.keys import object_key
from moonpool.base.log import RateLimitedLog
from moonpool.base.object_header import ObjectKind
from moonpool.engine.sequence import FullBlock
from moonpool.store import Store
from moonpool.store.client.put_request import PutRequest
from moonpool.store.client.put_session import PutSession
from moonpool.store.client.whole_puts import PendingPuts
from moonpool.transfer.memory.buffers import DeviceSpan
from moonpool.worker.kv_link.pieces import PieceMemory, ReadyPoint

_LOG = logging.getLogger(__name__)
_WRITE_NBYTES = 1024 * 1024
_GPU_WRITE_NBYTES = 512 * 1024 * 1024  # 10 ms; hand-offs between GPUs take another way
_NUM_UNDER_WAY = 3  # writes of that size
_SMALL_NBYTES = 64 * 1024
_MAX_NBYTES = 8 * 1024**2
_FAST_S = 0.1  # a larger object is tried only if the one before took less
_UNKNOWN_EVERY_S = 5.0
_QUIET_S = 30.0


def verified_nbytes(store: Store, key: bytes) -> int:
    """Read an object, check every byte, and return its size. Raise NotFound when no replica passes."""
    value = store.get(key)
    if value is None:
        raise NotFound(f"no replica passes its checks: {store.why(key)}")
    return len(value)


class PoolHealth:
    """Whether the pool rests: it missed a deadline less than `rest_s` ago. Thread-safe."""

    def __init__(self, rest_s: float = 10.0, clock: Clock | None = None) -> None:
        self.rest_s = rest_s
        self._clock: Clock = clock or SystemClock()
        self._rests_until_s: float | None = None
        self._refusal_log = RateLimitedLog(_LOG, interval_s=math.inf)  # a refusal lasts until a setting changes

    @property
    def is_resting(self) -> bool:
        """True while the pool should not be asked; its blocks count as misses."""
        return self._rests_until_s is not None and self._clock.now_s() < self._rests_until_s

    def record_error(self, error: MoonpoolError | None) -> None:
        """Let the pool rest if the error is a missed deadline; log a refusal. None is ignored."""
        if isinstance(error, Unauthorized):
            self._refusal_log.warning(
                "%s; its blocks are misses and none is put there until this setting is corrected", error, key=str(error)
            )
        if isinstance(error, DeadlineExceeded):
            self._rests_until_s = self._clock.now_s() + self.rest_s


class PoolWriter:
    """Puts blocks into the pool, on the pool thread of a SendQueue. `failures` counts what could not be put, by the
    error's code.
    """

    def __init__(self, store: Store, memory: PieceMemory, identity: bytes, health: PoolHealth | None = None) -> None:
        self._store = store
        self._memory = memory
        self._identity = identity
        self._health = health or PoolHealth()
        self.failures: Counter[str] = Counter()

    @property
    def max_pieces(self) -> int:
        """How many pieces to write at once: many, but hand-offs share the link with them, and each write has to be done
        in the time that the pool has for one answer.
        """
        write_nbytes = _GPU_WRITE_NBYTES if self._memory.puts_whole else _WRITE_NBYTES
        return max(1, write_nbytes // self._memory.layout.piece_nbytes)

    def begin(self, keys: Sequence[bytes], parents: Mapping[bytes, bytes]) -> dict[bytes, PutSession]:
        """Return sessions for the blocks that the pool does not have and has room for. `parents` maps each
        block to the one before it, so that the pool evicts a conversation from its end.
        """
        if self._health.is_resting:
            self.failures[Unavailable.code] += len(keys)
            return {}
        try:
            outcomes = self._store.piece_puts.begin([self.request(key, parents) for key in keys])
        except MoonpoolError as error:
            self._health.record_error(error)
            self.failures[error.code] += len(keys)
            return {}
        self.failures.update(o.code for o in outcomes if isinstance(o, MoonpoolError) and o.code != "already_exists")
        return {key: o for key, o in zip(keys, outcomes, strict=True) if isinstance(o, PutSession)}

    def request(self, key: bytes, parents: Mapping[bytes, bytes]) -> PutRequest:
        """Return how this block is put."""
        layout = self._memory.layout
        return PutRequest(
            key=object_key(key),
            piece_nbytes=(layout.piece_nbytes,) * layout.num_layers,
            kind=ObjectKind.BLOCK,
            identity=self._identity,
            valid_tokens=layout.block_tokens,
            parent=object_key(parents[key]) if key in parents else b"",
        )

    def record_failures(self, errors: Iterable[MoonpoolError]) -> None:
        """Count blocks that could not be put; one that the pool has already is no failure."""
        for error in errors:
            self._health.record_error(error)
            if error.code != "already_exists":
                self.failures[error.code] += 1

    def write(self, pages: Mapping[PutSession, int], layers: range, ready: ReadyPoint | None = None) -> set[PutSession]:
        """Write these layers of each session's page, as they are once `ready` is reached. Return the sessions that
        failed; they are counted and aborted.

        All fail at once while the pool rests.
        """
        if not pages:
            return set()
        if self._health.is_resting:
            return self._give_up(dict.fromkeys(pages, Unavailable("the pool did not answer in time a moment ago")))
        if self._memory.puts_whole:
            return self._end_whole(pages, self._start_whole(pages, ready))
        writes = [
            (session, layer, self._memory.memory(page, range(layer, layer + 1)), None)
            for layer in layers
            for session, page in pages.items()
        ]
        errors = self._store.piece_puts.write(writes)
        return self._record({write[0]: error for write, error in zip(writes, errors, strict=True) if error is not None})

    def _start_whole(self, pages: Mapping[PutSession, int], ready: ReadyPoint | None) -> PendingPuts:
        layers = range(self._memory.layout.num_layers)
        sums = self._memory.checksums(list(pages.values()), layers, ready).tolist()
        spans = [self._memory.memory(page, layers) for page in pages.values()]
        return self._store.piece_puts.start_whole(
            [
                (session, span, checksums)
                for session, span, checksums in zip(pages, spans, sums, strict=True)
                if isinstance(span, DeviceSpan)  # always
            ]
        )

    def _end_whole(self, pages: Mapping[PutSession, int], puts: PendingPuts) -> set[PutSession]:
        errors = puts.wait()
        return self._record({each: error for each, error in zip(pages, errors, strict=True) if error is not None})

    def _record(self, failed: Mapping[PutSession, MoonpoolError]) -> set[PutSession]:
        for error in failed.values():
            self._health.record_error(error)
        return self._give_up(failed)

    def renew(self, sessions: Sequence[PutSession]) -> None:
        """Tell the pool that these puts go on: a prompt may take longer to compute than the pool waits for a put."""
        try:
            self._store.piece_puts.renew(sessions)
        except MoonpoolError as error:  # a put that was discarded fails when it ends
            self._health.record_error(error)

    def finish(self, sessions: Sequence[PutSession]) -> None:
        try:
            outcomes = self._store.piece_puts.finish(sessions)
            self.failures.update(o.code for o in outcomes if o is not None)
        except MoonpoolError as error:
            self._health.record_error(error)
            self.failures[error.code] += len(sessions)

    def abort(self, sessions: Sequence[PutSession]) -> None:
        try:
            self._store.piece_puts.abort(sessions)
        except MoonpoolError as error:  # the master forgets them by itself after a while
            self.failures[error.code] += len(sessions)

    def put_pages(self, blocks: Mapping[int, FullBlock], ready: ReadyPoint | None = None) -> None:
        """Put whole blocks, by the page that each lies in, as they are once `ready` is reached. For blocks that
        decoding completed. When this returns the pages are not read any more.
        """
        page_of = {block.key: page for page, block in blocks.items()}
        parents = {block.key: block.parent for block in blocks.values() if block.parent is not None}
        if self._memory.puts_whole:
            self._put_whole(page_of, parents, ready)
            return
        sessions = self.begin(list(page_of), parents)
        if not sessions:
            return
        pages = {session: page_of[key] for key, session in sessions.items()}
        layers = range(self._memory.layout.num_layers)
        step = max(1, self.max_pieces // len(pages))
        for first in layers[::step]:
            failed = self.write(pages, layers[first : first + step])
            pages = {session: page for session, page in pages.items() if session not in failed}
        self.finish(list(pages))

    def _put_whole(
        self, page_of: Mapping[bytes, int], parents: Mapping[bytes, bytes], ready: ReadyPoint | None
    ) -> None:
        """Put blocks in groups: while the device copies some, others get their space, or are finished."""
        keys, number = list(page_of), max(1, self.max_pieces // self._memory.layout.num_layers)
        under_way: deque[tuple[dict[PutSession, int], PendingPuts]] = deque()

        def end_first() -> None:
            pages, puts = under_way.popleft()
            failed = self._end_whole(pages, puts)
            self.finish([session for session in pages if session not in failed])

        try:
            for first in range(0, len(keys), number):
                sessions = self.begin(keys[first : first + number], parents)
                pages = {session: page_of[key] for key, session in sessions.items()}
                if pages:
                    under_way.append((pages, self._start_whole(pages, ready)))
                if len(under_way) == _NUM_UNDER_WAY:
                    end_first()
        finally:
            while under_way:
                end_first()

    def _give_up(self, errors: Mapping[PutSession, MoonpoolError]) -> set[PutSession]:
        if errors:
            self.failures.update(error.code for error in errors.values())
            self.abort(list(errors))
        return set(errors)


class PoolProbe:
    """Measures how fast the pool is before a request needs it: puts an object, reads it back and removes it. The first
    object is small, so that a slow pool is detected by the small one.

    A worker measures before it registers, and again when it has pulled nothing for a while: a policy that avoids a slow
    pool would otherwise never learn that the pool is fast again. `connect` makes a client for the probe alone, so that
    the worker's counters count only requests. `block_nbytes` is the size of the objects that requests pull.
    """

    def __init__(self, connect: Callable[[], Store], block_nbytes: int, clock: Clock) -> None:
        self._connect, self._clock = connect, clock
        self._sizes = sorted({_SMALL_NBYTES, min(max(block_nbytes, _SMALL_NBYTES), _MAX_NBYTES)})

    def measure(self) -> list[PullSample]:
        """Return the samples; [] if the pool cannot be reached."""
        samples: list[PullSample] = []
        try:
            with self._connect() as store:
                for sample in self._read_back(store):
                    samples.append(sample)
                    if sample.seconds > _FAST_S:
                        break
        except MoonpoolError as error:
            _LOG.debug("the pool was not measured: %s", error)
        return samples

    def _read_back(self, store: Store) -> Iterator[PullSample]:
        for nbytes in self._sizes:
            key = f"moonpool-probe/{secrets.token_hex(8)}".encode()
            store.put(key, bytes(nbytes))
            into = bytearray(nbytes)
            try:
                began_s = self._clock.now_s()
                if store.get_into(key, into) == nbytes:
                    yield PullSample(nbytes, max(self._clock.now_s() - began_s, 1e-9))
            finally:
                with contextlib.suppress(MoonpoolError):
                    store.remove(key, force=True)

    async def keep_measuring(
        self, add: Callable[[list[PullSample]], None], last_pull_s: Callable[[], float | None]
    ) -> None:
        """Measure again whenever nothing has been pulled for a while. Runs until it is cancelled.

        `add` gets the samples; `last_pull_s` returns when a request last pulled, or None.
        """
        measured_s: float | None = None
        while True:
            await asyncio.sleep(_UNKNOWN_EVERY_S)
            known_s = max((at_s for at_s in (last_pull_s(), measured_s) if at_s is not None), default=None)
            if known_s is not None and self._clock.now_s() - known_s < _QUIET_S:
                continue
            found = await asyncio.to_thread(self.measure)
            if found:
                add(found)
                measured_s = self._clock.now_s()
