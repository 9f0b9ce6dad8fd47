"""One object, read piece by piece by its key."""

from __future__ import annotations

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.errors import NotFound, StaleGeneration, Unavailable
from moonpool.store.client.read_session import ReadSession
from moonpool.store.client.reads import ClientReads
from moonpool.store.client.recovery import missing
from moonpool.store.messages import ObjectInfo
from moonpool.transfer.memory.buffers import Buffer


class PieceReader:
    """Reads one object, from one thread at a time. Reading renews its lease.

    Every piece is verified as it is read. Leaving the `with` block raises StaleGeneration unless the object was the
    same from the first to the last piece.
    """

    def __init__(self, reads: ClientReads, key: bytes, identity: bytes | None, clock: Clock | None = None) -> None:
        """Raise NotFound for a miss, else as PieceReads.open()."""
        self._reads, self._key = reads, key
        self._clock = clock or SystemClock()
        self._leased_s = self._clock.now_s()
        self._session = self._open(identity)

    @property
    def piece_sizes(self) -> tuple[int, ...]:
        return self._session.fields.sizes

    @property
    def nbytes(self) -> int:
        return self._session.nbytes

    def read_into(self, index: int, buffer: Buffer) -> None:
        """Copy piece `index` into the buffer, which must have its size, and verify the copy."""
        self._renew_lease_if_due()
        self._session.read_piece(index, buffer)

    def finish(self) -> None:
        """Raise StaleGeneration unless the object was the same from the first to the last piece."""
        self._session.finish()

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()

    def _open(self, identity: bytes | None) -> ReadSession:
        info = self._lookup()
        try:
            return self._reads.pieces.open(info, identity)
        except (StaleGeneration, Unavailable, NotFound):  # replaced or moved between the look-up and the first byte
            return self._reads.pieces.open(self._lookup(), identity)

    def _lookup(self) -> ObjectInfo:
        (info,) = self._reads.lookup([self._key])
        if info is None:
            raise missing(self._key)
        self._renew_after_s = info.lease_s / 2
        return info

    def _renew_lease_if_due(self) -> None:
        if self._clock.now_s() - self._leased_s > self._renew_after_s:
            self._leased_s = self._clock.now_s()
            self._reads.exist([self._key])
