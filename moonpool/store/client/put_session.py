"""Writing one object: its pieces in any order and from any thread, then its header, to every replica.

A replica that cannot be written is left out; the put fails only when none is left. Nothing is visible to readers
before StoreClient.finish_puts() has told the master. A session that lasts is renewed as its pieces are written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from moonpool.base.checksum import crc32c
from moonpool.base.clock import Clock
from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound, StaleGeneration, Unauthorized, Unavailable
from moonpool.base.object_header import header_nbytes
from moonpool.store.client.counters import ClientCounters
from moonpool.store.client.headers import pack_header
from moonpool.store.client.put_request import PutRequest
from moonpool.store.client.session_client import SessionClient
from moonpool.store.messages import Placement
from moonpool.transfer.memory.buffers import Buffer, as_bytes_view

# What may go wrong with one replica and leave the others usable.
REPLICA_ERRORS = (Unavailable, NotFound, StaleGeneration, Unauthorized)

Renew = Callable[["PutSession"], None]


class PutTools:
    """What sessions share: the way to memory, the counters, the clock and the master's ear."""

    def __init__(
        self,
        *,
        holder: SessionClient,
        counters: ClientCounters,
        clock: Clock,
        timeout_s: float,
        renew_after_s: float,
        renew: Renew,
    ) -> None:
        self.holder, self.counters, self.clock = holder, counters, clock
        self.timeout_s, self.renew_after_s, self.renew = timeout_s, renew_after_s, renew


class PutSession:
    """Space that the master granted. End it with StoreClient.finish_puts() or abort_puts()."""

    def __init__(
        self, request: PutRequest, generation: int, replicas: Sequence[Placement], session: int, tools: PutTools
    ) -> None:
        self.request = request
        self.generation = generation
        self.settled = True  # no write of ours can still arrive
        self._session = session
        self._tools = tools
        self._replicas = list(replicas)
        self._failed: list[str] = []
        self._failure: MoonpoolError | None = None
        self._checksums: list[int | None] = [None] * len(request.piece_nbytes)
        first = header_nbytes(len(request.key), len(request.piece_nbytes))
        self._offsets = list(accumulate(request.piece_nbytes, initial=first))
        self._renewed_s = tools.clock.now_s()

    @property
    def key(self) -> bytes:
        return self.request.key

    @property
    def failed(self) -> tuple[str, ...]:
        """Segments whose replicas could not be written."""
        return tuple(self._failed)

    @property
    def num_replicas(self) -> int:
        """Those that have all that was written so far."""
        return len(self._replicas)

    def write_piece(self, index: int, buffer: Buffer, checksum: int | None = None) -> None:
        """Copies piece `index` to the replicas. `checksum` is its crc32c if the caller knows it.

        The buffer is the caller's again when this returns. Raises when no replica could be written, StaleGeneration
        when the put was discarded meanwhile.
        """
        view = as_bytes_view(buffer, writable=False)
        if view.nbytes != self.request.piece_nbytes[index]:
            raise InvalidInput(f"piece {index} has {self.request.piece_nbytes[index]} bytes, not {view.nbytes}")
        self._stay()
        self._checksums[index] = crc32c(view) if checksum is None else checksum
        self._write(self._offsets[index], view)
        self._tools.counters.add("bytes_written", view.nbytes)

    def write_header(self) -> None:
        """For finish_puts: states what the pieces are. InvalidInput when one was not written."""
        checksums = [checksum for checksum in self._checksums if checksum is not None]
        if len(checksums) < len(self._checksums):
            missing = self._checksums.index(None)
            raise InvalidInput(f"piece {missing} of {self.key.hex()[:16]} was not written")
        request = self.request
        header = pack_header(
            request.key,
            self.generation,
            request.piece_nbytes,
            checksums,
            kind=request.kind,
            identity=request.identity,
            valid_tokens=request.valid_tokens,
        )
        self._write(0, memoryview(header))

    def _stay(self) -> None:
        """Long before the master would discard the put, tells it that the put goes on."""
        tools, now_s = self._tools, self._tools.clock.now_s()
        if now_s - self._renewed_s >= tools.renew_after_s:
            self._renewed_s = now_s  # first: one thread asks, the others go on
            tools.renew(self)

    def _write(self, at: int, view: memoryview) -> None:
        tools = self._tools
        for placement in list(self._replicas):
            try:
                remote = tools.holder.open_for_writing(placement, self._session)
                remote.write_from(
                    placement.offset + at, [view], generation=placement.generation, timeout_s=tools.timeout_s
                )
            except REPLICA_ERRORS as error:
                self._give_up(placement, error)
        if not self._replicas:
            assert self._failure is not None, "a grant has a replica, so one has failed"
            raise self._failure

    def _give_up(self, placement: Placement, error: MoonpoolError) -> None:
        # After a lost connection or a deadline the bytes may still be on their way to the other side.
        self.settled = self.settled and not isinstance(error, Unavailable)
        self._failure = error
        if isinstance(error, Unauthorized):
            self._tools.counters.add_refusal(error)
        if placement in self._replicas:  # another thread may have been first
            self._replicas.remove(placement)
            self._failed.append(placement.segment)
