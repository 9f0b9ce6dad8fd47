"""Turns objects that lie anywhere in memory into few large writes of whole, aligned blocks.

Large aligned parts are written from where they lie; everything else is gathered in a staging buffer first, so that a
thousand small objects are one write and not a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.node.ssd.layout import UNIT_NBYTES
from moonpool.node.ssd.log_file import SsdLogFile
from moonpool.transfer.memory.buffers import address_of, copy_bytes

_IN_PLACE_NBYTES = 64 * 1024  # below this a copy costs less than another element in the kernel's list
_MAX_VIEWS = 1000
_ZEROS = memoryview(bytes(UNIT_NBYTES))


class BlockStream:
    """Writes what it is given to a file, from `offset` on. The staging buffer is whole blocks, aligned, borrowed."""

    def __init__(self, file: SsdLogFile, offset: int, staging: memoryview, memory_nbytes: int) -> None:
        self._file = file
        self._staging = staging
        self._memory_nbytes = memory_nbytes
        self._written_to = self._at = offset  # the second runs ahead
        self._group: list[memoryview] = []
        self._staged = self._run_start = 0  # filled part of the staging buffer; where its last run begins

    def add(self, views: Sequence[memoryview]) -> None:
        """One object (or header), from a block boundary on, padded to the next with zeros."""
        for view in views:
            self._add(view)
        self._stage(_ZEROS[: -self._at % UNIT_NBYTES])

    def finish(self) -> None:
        """All is written. The memory that was given is not looked at any more."""
        self._end_run()
        if self._group:
            self._file.write(self._written_to, self._group)
        self._written_to, self._group, self._staged, self._run_start = self._at, [], 0, 0

    def _add(self, view: memoryview) -> None:
        in_place = view.nbytes // UNIT_NBYTES * UNIT_NBYTES
        aligned = self._at % UNIT_NBYTES == 0 and view.nbytes >= _IN_PLACE_NBYTES
        if not aligned or address_of(view) % self._memory_nbytes:
            self._stage(view)
            return
        self._end_run()
        self._group.append(view[:in_place])
        self._at += in_place
        if len(self._group) >= _MAX_VIEWS:
            self.finish()
        self._stage(view[in_place:])

    def _stage(self, view: memoryview) -> None:
        while view.nbytes:
            if self._staged == self._staging.nbytes:  # whole blocks, so this is a block boundary
                self.finish()
            part = view[: self._staging.nbytes - self._staged]
            copy_bytes(self._staging[self._staged : self._staged + part.nbytes], part)
            self._staged += part.nbytes
            self._at += part.nbytes
            view = view[part.nbytes :]

    def _end_run(self) -> None:
        if self._staged > self._run_start:
            self._group.append(self._staging[self._run_start : self._staged])
            self._run_start = self._staged
