"""A single small put to space that was granted ahead: write it, then tell the master, with nothing made for batches.

The write is one copy on one machine, and one round trip over tcp on the caller's thread. What fails before the master
was told is put again in the ordinary way (put_batch.py), which finds out what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.base.checksum import crc32c
from moonpool.base.errors import MoonpoolError, StaleGeneration, Unauthorized, Unavailable
from moonpool.store.client.ahead import HeldPlace
from moonpool.store.client.put_request import Put, object_views
from moonpool.store.client.put_tools import REPLICA_ERRORS, PutTools


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
        views = object_views(put, generation, parts, [crc32c(part) for part in parts])
        remote = self._tools.sessions.open_for_writing(place, held.session)
        remote.write_views(place.offset, views, generation, self._tools.timeout_s)
