"""Context managers that write and read one object piece by piece, for example layer by layer."""

from __future__ import annotations

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.errors import FewerReplicas, MoonpoolError, NotFound, StaleGeneration, Unavailable
from moonpool.store.client import StoreClient
from moonpool.store.client.put_request import PutRequest
from moonpool.store.client.put_session import PutSession
from moonpool.store.client.read_session import ReadSession
from moonpool.store.client.reads import missing
from moonpool.store.messages import ObjectInfo
from moonpool.transfer.memory.buffers import Buffer


class PieceWriter:
    """Writes one object. Leaving the `with` block makes it visible; an error in the block gives the space back."""

    def __init__(self, client: StoreClient, request: PutRequest) -> None:
        """Raise AlreadyExists, NoSpace or InvalidInput when there is no space for it."""
        self._client = client
        (begun,) = client.begin_puts([request])
        if isinstance(begun, MoonpoolError):
            raise begun
        self._session: PutSession = begun

    def write(self, index: int, buffer: Buffer) -> None:
        """Copy piece `index`, in any order, from any thread. The buffer is the caller's again when this returns."""
        self._session.write_piece(index, buffer)

    def finish(self) -> None:
        """Make the object visible. Raise InvalidInput when a piece is missing, StaleGeneration when it took too long;
        nothing is stored then. Fewer replicas than asked for are no error; they are counted (`fewer_replicas`).
        """
        (error,) = self._client.finish_puts([self._session])
        if error is not None and not isinstance(error, FewerReplicas):
            raise error

    def abort(self) -> None:
        self._client.abort_puts([self._session])

    def __enter__(self) -> PieceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()


class PieceReader:
    """Reads one object, from one thread at a time. Reading renews its lease.

    Every piece is verified as it is read. Leaving the `with` block raises StaleGeneration unless the object was the
    same from the first to the last piece.
    """

    def __init__(self, client: StoreClient, key: bytes, identity: bytes | None, clock: Clock | None = None) -> None:
        """Raise NotFound for a miss, else as StoreClient.open_read()."""
        self._client, self._key = client, key
        self._clock = clock or SystemClock()
        self._leased_s = self._clock.now_s()
        self._session = self._open(identity)

    @property
    def piece_sizes(self) -> tuple[int, ...]:
        return tuple(piece.nbytes for piece in self._session.header.pieces)

    @property
    def nbytes(self) -> int:
        return self._session.nbytes

    def read_into(self, index: int, buffer: Buffer) -> None:
        """Copy piece `index` into the buffer, which must have its size, and verify the copy."""
        self._renew_lease_if_due()
        self._session.read_piece(index, buffer)

    def finish(self) -> None:
        self._session.finish()

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()

    def _open(self, identity: bytes | None) -> ReadSession:
        info = self._lookup()
        try:
            return self._client.open_read(info, identity)
        except (StaleGeneration, Unavailable, NotFound):  # replaced or moved between the look-up and the first byte
            return self._client.open_read(self._lookup(), identity)

    def _lookup(self) -> ObjectInfo:
        info = self._client.lookup([self._key])[0]
        if info is None:
            raise missing(self._key)
        self._renew_after_s = info.lease_s / 2
        return info

    def _renew_lease_if_due(self) -> None:
        if self._clock.now_s() - self._leased_s > self._renew_after_s:
            self._leased_s = self._clock.now_s()
            self._client.exist([self._key])
