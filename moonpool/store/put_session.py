"""Writing one object: its pieces in any order and from any thread, then its header, to every replica.

A replica that cannot be written is left out; the put fails only when none is left. Nothing is visible to readers
before StoreClient.finish_puts() has told the master.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from moonpool.base.checksum import crc32c
from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound, StaleGeneration, Unauthorized, Unavailable
from moonpool.base.object_header import NO_IDENTITY, ObjectHeader, ObjectKind, Piece, header_nbytes
from moonpool.store.counters import ClientCounters
from moonpool.store.directory import SegmentDirectory
from moonpool.store.messages import Placement, PutGrant, Written
from moonpool.transfer.buffers import as_bytes_view

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True)
class PutRequest:
    """An object to store: its key and what its pieces will be. A hard-pinned one is never evicted."""

    key: bytes
    piece_nbytes: tuple[int, ...]
    kind: ObjectKind = ObjectKind.OPAQUE
    identity: bytes = NO_IDENTITY
    valid_tokens: int = 0
    num_replicas: int = 1
    preferred_segment: str | None = None
    pinned: bool = False

    @property
    def nbytes(self) -> int:
        """Header and pieces."""
        return header_nbytes(len(self.key), len(self.piece_nbytes)) + sum(self.piece_nbytes)


class PutSession:
    """Space that the master granted. End it with StoreClient.finish_puts() or abort_puts()."""

    def __init__(
        self,
        request: PutRequest,
        grant: PutGrant,
        directory: SegmentDirectory,
        counters: ClientCounters,
        timeout_s: float,
    ) -> None:
        self.request = request
        self.generation = grant.generation
        self.settled = True  # no write of ours can still arrive
        self._directory = directory
        self._counters = counters
        self._timeout_s = timeout_s
        self._replicas = list(grant.replicas)
        self._failed: list[str] = []
        self._failure: MoonpoolError | None = None
        self._checksums: list[int | None] = [None] * len(request.piece_nbytes)
        first = header_nbytes(len(request.key), len(request.piece_nbytes))
        self._offsets = list(accumulate(request.piece_nbytes, initial=first))

    @property
    def key(self) -> bytes:
        return self.request.key

    def write_piece(self, index: int, buffer: Buffer, checksum: int | None = None) -> None:
        """Copies piece `index` to the replicas. `checksum` is its crc32c if the caller knows it.

        The buffer is the caller's again when this returns. Raises when no replica could be written.
        """
        view = as_bytes_view(buffer, writable=False)
        if view.nbytes != self.request.piece_nbytes[index]:
            raise InvalidInput(f"piece {index} has {self.request.piece_nbytes[index]} bytes, not {view.nbytes}")
        self._checksums[index] = crc32c(view) if checksum is None else checksum
        self._write(self._offsets[index], view)
        self._counters.add("bytes_written", view.nbytes)

    def write_header(self) -> None:
        """For finish_puts: states what the pieces are. InvalidInput when one was not written."""
        checksums = [checksum for checksum in self._checksums if checksum is not None]
        if len(checksums) < len(self._checksums):
            missing = self._checksums.index(None)
            raise InvalidInput(f"piece {missing} of {self.key.hex()[:16]} was not written")
        request = self.request
        header = ObjectHeader(
            key=request.key,
            generation=self.generation,
            pieces=tuple(map(Piece, request.piece_nbytes, checksums)),
            kind=request.kind,
            identity=request.identity,
            valid_tokens=request.valid_tokens,
        )
        self._write(0, memoryview(header.pack()))

    def written(self) -> Written:
        """What the master is told about it."""
        return Written(self.key, self.generation, tuple(self._failed))

    def _write(self, at: int, view: memoryview) -> None:
        for placement in list(self._replicas):
            try:
                remote = self._directory.open(placement)
                remote.write_from(placement.offset + at, [view], generation=self.generation, timeout_s=self._timeout_s)
            except (Unavailable, NotFound, StaleGeneration, Unauthorized) as error:
                self._give_up(placement, error)
        if not self._replicas:
            assert self._failure is not None, "a grant has a replica, so one has failed"
            raise self._failure

    def _give_up(self, placement: Placement, error: MoonpoolError) -> None:
        # After a lost connection or a deadline the bytes may still be on their way to the other side.
        self.settled = self.settled and not isinstance(error, Unavailable)
        self._failure = error
        if isinstance(error, Unauthorized):
            self._counters.add_refusal(error)
        if placement in self._replicas:  # another thread may have been first
            self._replicas.remove(placement)
            self._failed.append(placement.segment)
