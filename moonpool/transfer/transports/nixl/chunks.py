"""How a transfer is cut to fit into staging memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from moonpool.transfer.desk import Spans

MAX_SPANS = 4096  # per chunk; beyond that NIXL's own work per descriptor is all there is to win from


@dataclass
class Chunk:
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
) -> Iterator[Chunk]:
    """All bytes in order, in chunks that are full but for the last one; an item may be cut anywhere."""
    chunk = Chunk()
    for offset, view in placed:
        at = 0
        while at < view.nbytes:
            if chunk.nbytes == max_nbytes or len(chunk.spans) == max_spans:
                yield chunk
                chunk = Chunk()
            part = view[at : at + max_nbytes - chunk.nbytes]
            chunk.add(offset + at, part)
            at += part.nbytes
    if chunk.nbytes:
        yield chunk


def merge_spans(placed: Sequence[tuple[int, memoryview]]) -> Spans:
    """What the items cover, those that follow each other as one span; empty ones left out."""
    spans: Spans = []
    for offset, view in placed:
        if view.nbytes:
            extend_spans(spans, offset, view.nbytes)
    return spans


def extend_spans(spans: Spans, offset: int, nbytes: int) -> None:
    if spans and sum(spans[-1]) == offset:
        spans[-1] = (spans[-1][0], spans[-1][1] + nbytes)
    else:
        spans.append((offset, nbytes))
