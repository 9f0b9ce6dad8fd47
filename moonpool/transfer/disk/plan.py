"""Which parts of a request go straight between disk and memory, and which by way of a bounce buffer. No I/O.

The spans of a request cover it exactly and in order. A direct span begins and ends at block boundaries and all its
pieces are aligned; so a bounce span touches part of a block only at the request's own first and last byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moonpool.transfer.disk.alignment import Alignment
from moonpool.transfer.memory.buffers import address_of


class FileSpan(NamedTuple):
    """Bytes `offset` .. `offset + nbytes` of the file, which are those of the views."""

    direct: bool
    offset: int
    nbytes: int
    views: list[memoryview]


def plan_spans(offset: int, views: Sequence[memoryview], alignment: Alignment) -> list[FileSpan]:
    if len(views) == 1 and _is_aligned(offset, views[0], alignment):
        return [FileSpan(True, offset, views[0].nbytes, list(views))]  # the usual request, at a third of the price
    spans: list[FileSpan] = []
    for view in views:
        for direct, part in _split(offset, view, alignment):
            if spans and spans[-1].direct is direct:
                last = spans[-1]
                last.views.append(part)
                spans[-1] = last._replace(nbytes=last.nbytes + part.nbytes)
            else:
                spans.append(FileSpan(direct, offset, part.nbytes, [part]))
            offset += part.nbytes
    return spans


def _split(offset: int, view: memoryview, alignment: Alignment) -> list[tuple[bool, memoryview]]:
    """The unaligned head, the aligned middle and the unaligned tail of one view, empty ones left out."""
    block = alignment.block_nbytes
    head = -offset % block
    end = head + (view.nbytes - head) // block * block
    if end <= head or (address_of(view) + head) % alignment.memory_nbytes:
        return [(False, view)]
    parts = [(False, view[:head]), (True, view[head:end]), (False, view[end:])]
    return [part for part in parts if part[1].nbytes]


def _is_aligned(offset: int, view: memoryview, alignment: Alignment) -> bool:
    block = alignment.block_nbytes
    return not (offset % block or view.nbytes % block or address_of(view) % alignment.memory_nbytes)


class Cursor:
    """Takes a list of views from front to back, in time proportional to its length."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._index = 0
        self._start = 0  # what is taken of the view at _index

    def take(self, nbytes: int, max_views: int | None = None) -> list[memoryview]:
        """The next views, the last one cut, of `nbytes` together; fewer at the end or when there are too many."""
        taken: list[memoryview] = []
        while nbytes and self._index < len(self._views) and (max_views is None or len(taken) < max_views):
            part = self._views[self._index][self._start : self._start + nbytes]
            taken.append(part)
            nbytes -= part.nbytes
            self._start += part.nbytes
            if self._start == self._views[self._index].nbytes:
                self._index, self._start = self._index + 1, 0
        return taken
