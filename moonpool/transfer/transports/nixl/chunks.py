"""How a transfer is cut to fit into staging memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from moonpool.transfer.memory.fence import Spans, extend_spans

MAX_SPANS = 4096  # per chunk; beyond that NIXL's own work per descriptor is all there is to win from


@dataclass
class StagedChunk:
    """Bytes that lie one after the other in staging memory: where they are the caller's, and where the owner's."""

    views: list[memoryview] = field(default_factory=list)
    spans: Spans = field(default_factory=list)
    nbytes: int = 0

    def add(self, offset: int, view: memoryview) -> None:
        self.views.append(view)
        self.nbytes += view.nbytes
        extend_spans(self.spans, offset, view.nbytes)


def cut_chunks(
    placed: Iterable[tuple[int, memoryview]], max_nbytes: int, max_spans: int = MAX_SPANS
) -> Iterator[StagedChunk]:
    """All bytes in order, in chunks that are full but for the last one; an item may be cut anywhere."""
    chunk = StagedChunk()
    for offset, view in placed:
        at = 0
        while at < view.nbytes:
            if chunk.nbytes == max_nbytes or len(chunk.spans) == max_spans:
                yield chunk
                chunk = StagedChunk()
            part = view[at : at + max_nbytes - chunk.nbytes]
            chunk.add(offset + at, part)
            at += part.nbytes
    if chunk.nbytes:
        yield chunk
