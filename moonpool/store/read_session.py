"""Reading one object: nothing is believed before it is checked.

The header is checked first (its own checksum, key, generation, identity), then each piece as it lies in the reader's
memory, then the generation once more. A replica that fails is reported and the next one is tried. Wrong bytes are never
returned; they may lie in the caller's buffer after an error.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING

from moonpool.base.checksum import verify
from moonpool.base.errors import (
    Corrupt,
    InvalidInput,
    MoonpoolError,
    NotFound,
    StaleGeneration,
    Unauthorized,
    Unavailable,
)
from moonpool.base.object_header import ALIGN_NBYTES, ObjectHeader, announced_nbytes, unpack
from moonpool.store.counters import ClientCounters
from moonpool.store.directory import SegmentDirectory
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer.buffers import as_bytes_view
from moonpool.transfer.transports.base import RemoteSegment

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Enough of the header to see whose it is: magic to identity.
_PREFIX_NBYTES = 64

ReportCorrupt = Callable[[ObjectInfo, Placement], bool]


class ReadSession:
    """An object open for reading, by one thread. `header` says what its pieces are."""

    def __init__(
        self,
        info: ObjectInfo,
        identity: bytes | None,
        directory: SegmentDirectory,
        report_corrupt: ReportCorrupt,
        counters: ClientCounters,
        timeout_s: float,
    ) -> None:
        self.info = info
        self._identity = identity
        self._directory = directory
        self._report_corrupt = report_corrupt
        self._counters = counters
        self._timeout_s = timeout_s
        self._untried = directory.nearest_first(info.replicas)
        self._remote: RemoteSegment
        self._placement: Placement
        self._prefix: bytes
        self._header: ObjectHeader | None = None
        self._open_next(NotFound(f"{info.key.hex()[:16]} has no replica"))
        self._offsets = list(accumulate((piece.nbytes for piece in self.header.pieces), initial=self.header.nbytes))

    @property
    def header(self) -> ObjectHeader:
        assert self._header is not None, "an open session has a header"
        return self._header

    @property
    def nbytes(self) -> int:
        """Size of the pieces together."""
        return self._offsets[-1] - self._offsets[0]

    def read_piece(self, index: int, into: Buffer) -> None:
        """Copies piece `index` and checks the copy. Tries every replica; raises the last failure.

        StaleGeneration: the object is gone and its space was reused. Corrupt: no replica has the right bytes.
        """
        piece = self.header.pieces[index]
        view = as_bytes_view(into, writable=True)
        if view.nbytes != piece.nbytes:
            raise InvalidInput(f"piece {index} has {piece.nbytes} bytes, the buffer {view.nbytes}")
        while True:
            try:
                at = self._placement.offset + self._offsets[index]
                self._remote.read_into(at, [view], timeout_s=self._timeout_s)
                verify(self.header.checksum_kind, view, piece.checksum, f"piece {index} of {self.info.key.hex()[:16]}")
            except (Unavailable, NotFound, Unauthorized, Corrupt) as error:
                self._give_up(error)
                self._open_next(error)
            else:
                self._counters.add("bytes_read", view.nbytes)
                return

    def finish(self) -> None:
        """StaleGeneration when the space was given to another object meanwhile: use nothing of what was read."""
        if self._read_start(_PREFIX_NBYTES) != self._prefix:
            raise StaleGeneration(f"the space of {self.info.key.hex()[:16]} was reused while it was read")

    def _open_next(self, failure: MoonpoolError) -> None:
        """Makes the next good replica the current one; raises the last failure when there is none."""
        while self._untried:
            self._placement = self._untried.pop(0)
            try:
                self._remote = self._directory.open(self._placement)
                self._read_header()
            except (Unavailable, NotFound, Unauthorized, Corrupt, StaleGeneration) as error:
                self._give_up(error)
                failure = error
            else:
                return
        raise failure

    def _give_up(self, error: MoonpoolError) -> None:
        """Reports wrong bytes. When the master says that the object is another by now, we were only late."""
        if isinstance(error, Unavailable | NotFound | Unauthorized):
            return
        if not self._report_corrupt(self.info, self._placement):
            raise StaleGeneration(f"{self.info.key.hex()[:16]} was removed or replaced while it was read") from error
        self._counters.add("corrupt_replicas")

    def _read_header(self) -> None:
        raw = self._read_start(min(ALIGN_NBYTES, self.info.nbytes))
        nbytes = announced_nbytes(raw)
        if len(raw) < nbytes <= self.info.nbytes:
            raw = self._read_start(nbytes)
        header = unpack(raw)
        header.check(self.info.key, self.info.generation, self._identity)
        if header.nbytes + sum(piece.nbytes for piece in header.pieces) > self.info.nbytes:
            raise Corrupt(f"the pieces of {self.info.key.hex()[:16]} do not fit its space")
        if self._header is not None and header.pieces != self._header.pieces:
            raise Corrupt(f"the replicas of {self.info.key.hex()[:16]} differ")
        self._header, self._prefix = header, bytes(raw[:_PREFIX_NBYTES])

    def _read_start(self, nbytes: int) -> bytearray:
        raw = bytearray(nbytes)
        self._remote.read_into(self._placement.offset, [raw], timeout_s=self._timeout_s)
        return raw
