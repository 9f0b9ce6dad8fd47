"""Reading one object: nothing is believed before it is checked.

The header is checked first (its own checksum, key, generation, identity), then each piece as it lies in the reader's
memory, then the generation once more. A replica that fails is reported and the next one is tried. Wrong bytes are never
returned; they may lie in the caller's buffer after an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

from moonpool.base.checksum import ChecksumKind, crc32c
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
from moonpool.store.client.counters import ClientCounters
from moonpool.store.client.cuts import Part
from moonpool.store.client.directory import SegmentDirectory
from moonpool.store.messages import ObjectInfo, Placement
from moonpool.transfer.memory.buffers import Buffer, as_bytes_view
from moonpool.transfer.transports.base import RemoteSegment

# Enough of the header to see whose it is: magic to identity.
PREFIX_NBYTES = 64

Failures: TypeAlias = dict[tuple[str, int], MoonpoolError]  # by segment and incarnation: why it cannot be reached
ReportCorrupt = Callable[[ObjectInfo, Placement], bool]


class ReadTools:
    """What sessions share: the way to memory, the counters and the master's ear for wrong bytes."""

    def __init__(
        self,
        *,
        directory: SegmentDirectory,
        counters: ClientCounters,
        timeout_s: float,
        report_corrupt: ReportCorrupt,
    ) -> None:
        self.directory, self.counters = directory, counters
        self.timeout_s, self.report_corrupt = timeout_s, report_corrupt


class ReadSession:
    """An object open for reading, by one thread. `header` says what its pieces are.

    Segments in `failures` are not asked again; those that cannot be reached are added.
    """

    def __init__(
        self,
        info: ObjectInfo,
        identity: bytes | None,
        tools: ReadTools,
        failures: Failures | None = None,
    ) -> None:
        self.info = info
        self._identity = identity
        self._tools = tools
        self._failures = {} if failures is None else failures
        self._untried = tools.directory.best_first(info.replicas)
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
    def is_on_disk(self) -> bool:
        """Whether the replica that is read is on SSD; False when its segment is gone."""
        return self._tools.directory.is_disk(self._placement)

    @property
    def nbytes(self) -> int:
        """Size of the pieces together."""
        return self._offsets[-1] - self._offsets[0]

    def read_piece(self, index: int, into: Buffer) -> None:
        """Copies piece `index` and checks the copy. Tries every replica; raises the last failure.

        StaleGeneration: the object is gone and its space was reused. Corrupt: no replica has the right bytes.
        """
        view = as_bytes_view(into, writable=True)
        self.read_parts(index, [(view.nbytes, view)])

    def read_parts(self, index: int, parts: Sequence[Part]) -> None:
        """read_piece() into several places; bytes without one are read and checked all the same."""
        piece = self.header.pieces[index]
        nbytes = sum(part_nbytes for part_nbytes, _ in parts)
        if nbytes != piece.nbytes:
            raise InvalidInput(f"piece {index} has {piece.nbytes} bytes, the buffer {nbytes}")
        views = [memoryview(bytearray(part_nbytes)) if view is None else view for part_nbytes, view in parts]
        while True:
            try:
                at = self._placement.offset + self._offsets[index]
                self._remote.read_into(at, views, timeout_s=self._tools.timeout_s)
                self._verify(index, views)
            except (Unavailable, NotFound, Unauthorized, Corrupt) as error:
                self._give_up(error)
                self._open_next(error)
            else:
                self._tools.counters.add("bytes_read", nbytes)
                return

    def finish(self) -> None:
        """StaleGeneration when the space was given to another object meanwhile: use nothing of what was read."""
        if self._read_start(PREFIX_NBYTES) != self._prefix:
            raise StaleGeneration(f"the space of {self.info.key.hex()[:16]} was reused while it was read")

    def _verify(self, index: int, views: Sequence[memoryview]) -> None:
        if self.header.checksum_kind is ChecksumKind.NONE:
            return
        checksum = 0
        for view in views:
            checksum = crc32c(view, checksum)
        if checksum != self.header.pieces[index].checksum:
            raise Corrupt(f"checksum of piece {index} of {self.info.key.hex()[:16]} does not match")

    def _open_next(self, failure: MoonpoolError) -> None:
        """Makes the next good replica the current one; raises the last failure when there is none."""
        while self._untried:
            self._placement = self._untried.pop(0)
            known = self._failures.get((self._placement.segment, self._placement.incarnation))
            if known is not None:
                failure = known
                continue
            try:
                self._remote = self._tools.directory.open(self._placement)
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
            self._failures[self._placement.segment, self._placement.incarnation] = error
            self._tools.directory.unreadable.note(self._placement, error)
            return
        if not self._tools.report_corrupt(self.info, self._placement):
            raise StaleGeneration(f"{self.info.key.hex()[:16]} was removed or replaced while it was read") from error
        self._tools.counters.add("corrupt_replicas")

    def _read_header(self) -> None:
        raw = self._read_start(min(ALIGN_NBYTES, self.info.nbytes))
        nbytes = announced_nbytes(raw)
        if len(raw) < nbytes <= self.info.nbytes:
            raw = self._read_start(nbytes)
        header = unpack(raw)
        header.check(self.info.key, self._placement.generation, self._identity)
        if header.nbytes + sum(piece.nbytes for piece in header.pieces) > self.info.nbytes:
            raise Corrupt(f"the pieces of {self.info.key.hex()[:16]} do not fit its space")
        if self._header is not None and header.pieces != self._header.pieces:
            raise Corrupt(f"the replicas of {self.info.key.hex()[:16]} differ")
        self._header, self._prefix = header, bytes(raw[:PREFIX_NBYTES])

    def _read_start(self, nbytes: int) -> bytearray:
        raw = bytearray(nbytes)
        self._remote.read_into(self._placement.offset, [raw], timeout_s=self._tools.timeout_s)
        return raw
