"""Objects written and read piece by piece, as with statements: what a layer-wise producer or consumer uses."""

from __future__ import annotations

from moonpool.base.clock import Clock, SystemClock
from moonpool.base.errors import FewerReplicas, MoonpoolError, NotFound, StaleGeneration, Unavailable
from moonpool.store.client import StoreClient
from moonpool.store.client.put_request import PutRequest
from moonpool.store.client.put_session import PutSession
from moonpool.store.client.read_session import ReadSession
from moonpool.store.client.recovery import missing
from moonpool.store.messages import ObjectInfo
from moonpool.transfer.memory.buffers import Buffer


class PieceWriter:
    """Space for one object. Leaving the `with` makes it visible; leaving it by an error gives the space back."""

    def __init__(self, client: StoreClient, request: PutRequest) -> None:
        """AlreadyExists, NoSpace or InvalidInput when there is no space for it."""
        self._client = client
        (begun,) = client.begin_puts([request])
        if isinstance(begun, MoonpoolError):
            raise begun
        self._session: PutSession = begun

    def write(self, index: int, buffer: Buffer) -> None:
        """Copies piece `index`, in any order, from any thread; the buffer is the caller's again."""
        self._session.write_piece(index, buffer)

    def finish(self) -> None:
        """InvalidInput when a piece is missing, StaleGeneration when it took too long; then nothing was stored. Fewer
        replicas than asked for are no error; they are counted (`fewer_replicas`).
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
    """One object open for reading, by one thread at a time. Its lease is renewed as it is read.

    Every piece is verified as it is read; leaving the `with` in peace says that the object was the same from first to
    last, StaleGeneration that it was not.
    """

    def __init__(self, client: StoreClient, key: bytes, identity: bytes | None, clock: Clock | None = None) -> None:
        """NotFound for a miss; raises as StoreClient.open_read."""
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
        """Copies piece `index` into the buffer, which has its size, and verifies the copy."""
        self._stay()
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

    def _stay(self) -> None:
        if self._clock.now_s() - self._leased_s > self._renew_after_s:
            self._leased_s = self._clock.now_s()
            self._client.exist([self._key])
