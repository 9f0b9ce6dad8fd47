"""A single small put to space that was granted ahead: write it, then tell the master, with nothing made for batches.

The write is one copy on one machine, which two threads share if it is large, and one round trip over tcp on the
caller's thread. What fails before the master was told is put again in the ordinary way (put_batch.py), which finds out
what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.base.checksum import crc32c
from moonpool.base.errors import MoonpoolError, StaleGeneration, Unauthorized, Unavailable
from moonpool.base.object_header import header_nbytes
from moonpool.store.client.ahead import HeldPlace
from moonpool.store.client.put_request import Put, object_views
from moonpool.store.client.put_tools import REPLICA_ERRORS, PutTools
from moonpool.store.client.transfer_window import copy_shared
from moonpool.transfer.transports.mapped import MappedRemote

_SHARED_NBYTES = 512 * 1024  # two threads checksum and copy larger pieces: below, waking one takes longer


class SmallPuts:
    """Thread-safe."""

    def __init__(self, tools: PutTools) -> None:
        self._tools = tools

    def put(self, put: Put, parts: Sequence[memoryview], nbytes: int) -> tuple[MoonpoolError | None] | None:
        """Store the object of `nbytes`, whose pieces are `parts`. Return its error, or None in its place; return None
        instead if it has to be put in the ordinary way.
        """
        calls = self._tools.calls
        held = calls.take_ahead(put, nbytes)
        if held is None:
            return None
        try:
            self._write(put, parts, held)
        except REPLICA_ERRORS as failure:
            calls.ahead.drop(held, settled=not isinstance(failure, Unavailable))  # a write may still arrive
            if isinstance(failure, Unauthorized):
                self._tools.counters.add_refusal(failure)
            return None
        except BaseException:
            calls.ahead.drop(held, settled=False)
            raise
        self._tools.counters.add("bytes_written", sum([part.nbytes for part in parts]))
        error = calls.put_at(put, nbytes, held)
        if isinstance(error, StaleGeneration):
            return None
        if error is not None:
            self._tools.counters.add_refusal(error)
        return (error,)

    def _write(self, put: Put, parts: Sequence[memoryview], held: HeldPlace) -> None:
        place, generation = held.place, held.generation
        remote = self._tools.sessions.open_for_writing(place, held.session)
        if parts and parts[0].nbytes >= _SHARED_NBYTES and isinstance(remote, MappedRemote):
            self._write_large(put, parts, remote, place.offset, generation)
            return
        views = object_views(put, generation, parts, [crc32c(part) for part in parts])
        remote.write_views(place.offset, views, generation, self._tools.timeout_s)

    def _write_large(
        self, put: Put, parts: Sequence[memoryview], remote: MappedRemote, offset: int, generation: int
    ) -> None:
        """Copy the pieces and compute their checksums on two threads, then write the header."""

        def fill(memory: memoryview) -> memoryview:
            checksums: list[int] = []
            copy_shared(self._tools.engine, memory, parts, lambda: checksums.extend([crc32c(part) for part in parts]))
            return object_views(put, generation, parts, checksums)[0]

        writer, nbytes = remote.writer(self._tools.timeout_s), sum([part.nbytes for part in parts])
        writer.write_head_last(offset, header_nbytes(len(put.key), len(parts)), nbytes, fill, generation)
        writer.finish()
