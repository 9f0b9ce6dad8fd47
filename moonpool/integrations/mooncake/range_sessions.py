"""Objects that are written and read in ranges over several calls: OpenPuts and OpenReads.

A put reserves its space at the start and is visible at its end. A read finds the object once; every range is verified,
and refused when the object was removed or replaced since.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TypeAlias

from moonpool.base.errors import InvalidInput, MoonpoolError, NotFound, StaleGeneration, Unavailable
from moonpool.integrations.mooncake.piece_assembly import PieceAssembly
from moonpool.store import Store
from moonpool.store.client import PutRequest
from moonpool.store.client.cuts import cut_ranges, without_overlaps
from moonpool.store.client.put_session import PutSession
from moonpool.store.client.read_session import ReadSession

Ranges: TypeAlias = Sequence[tuple[int, memoryview]]  # where in the object, and the caller's memory


class _OpenPut:
    def __init__(self, session: PutSession) -> None:
        self.session = session
        self.assembly = PieceAssembly(session.request.piece_nbytes)
        self.failed: dict[int, MoonpoolError] = {}  # by piece; until it is written
        self.num_writing = 0
        self.is_sealed = False


_NOT_OPEN = InvalidInput("no put of this key is open")


def _why_not(put: _OpenPut | None) -> MoonpoolError | None:
    """Return why the put cannot be ended; None when it can."""
    return _NOT_OPEN if put is None else next(iter(put.failed.values()), None)


class OpenPuts:
    """Puts by key. Thread-safe. end() and revoke() wait for writes that are under way."""

    def __init__(self, client: Store) -> None:
        self._client = client
        self._changed = threading.Condition()
        self._puts: dict[bytes, _OpenPut] = {}

    def start(self, requests: Sequence[PutRequest]) -> list[MoonpoolError | None]:
        """Reserve space for each. Return by position None, or the error: AlreadyExists when the key is taken,
        InvalidInput when this client is putting it already, NoSpace.
        """
        with self._changed:
            taken = [request.key in self._puts for request in requests]
        fresh = [request for request, is_taken in zip(requests, taken, strict=True) if not is_taken]
        begun = iter(self._client.piece_puts.begin(fresh))
        outcomes: list[MoonpoolError | None] = []
        with self._changed:
            for request, is_taken in zip(requests, taken, strict=True):
                found = InvalidInput("this client is putting the key already") if is_taken else next(begun)
                if isinstance(found, PutSession):
                    self._puts[request.key] = _OpenPut(found)
                outcomes.append(found if isinstance(found, MoonpoolError) else None)
        return outcomes

    def write(self, items: Sequence[tuple[bytes, Ranges]]) -> list[int | MoonpoolError]:
        """Write ranges of each key with one transfer per segment. Return by position how many bytes, or the error:
        InvalidInput for an unknown key, a range outside the object, or a change of what was written.
        """
        outcomes: list[int | MoonpoolError] = []
        pieces: list[tuple[int, _OpenPut, int, memoryview]] = []
        with self._changed:
            for position, (key, ranges) in enumerate(items):
                put = self._puts.get(key)
                try:
                    if put is None or put.is_sealed:
                        raise _NOT_OPEN
                    complete = [each for offset, view in ranges for each in put.assembly.add(offset, view)]
                except InvalidInput as error:
                    outcomes.append(error)
                    continue
                pieces += [(position, put, index, view) for index, view in complete]
                outcomes.append(sum(view.nbytes for _, view in ranges))
            self._count_writing(pieces, +1)
        errors: Sequence[MoonpoolError | None] = [Unavailable("the write was interrupted")] * len(pieces)
        try:
            errors = self._client.piece_puts.write([(put.session, index, view, None) for _, put, index, view in pieces])
        finally:
            with self._changed:
                for (position, put, index, _), failure in zip(pieces, errors, strict=True):
                    if failure is None:
                        put.assembly.written(index)
                        put.failed.pop(index, None)
                    else:
                        outcomes[position] = put.failed[index] = failure
                self._count_writing(pieces, -1)
        return outcomes

    def end(self, keys: Sequence[bytes]) -> list[MoonpoolError | None]:
        """Make the objects visible; bytes that were not written are 0. Return the error of each, InvalidInput for an
        unknown key. A put that failed is given up.
        """
        found = self._seal(keys)
        self._client.piece_puts.abort([put.session for put in found if put is not None and put.failed])
        puts = [put for put in found if put is not None and not put.failed]
        rest = [(put.session, index, view, None) for put in puts for index, view in put.assembly.rest()]
        self._client.piece_puts.write(rest)  # finish() returns the error of a piece that was not written
        finished = iter(self._client.piece_puts.finish([put.session for put in puts]))
        return [_why_not(put) or next(finished) for put in found]

    def revoke(self, keys: Sequence[bytes]) -> list[MoonpoolError | None]:
        """Give up the puts and their space. Return InvalidInput for an unknown key."""
        found = self._seal(keys)
        self._client.piece_puts.abort([put.session for put in found if put is not None])
        return [_NOT_OPEN if put is None else None for put in found]

    def close(self) -> None:
        """Give up all puts."""
        with self._changed:
            keys = list(self._puts)
        self.revoke(keys)

    def _seal(self, keys: Sequence[bytes]) -> list[_OpenPut | None]:
        """Remove the puts, and wait for the calls that are writing them. Return None for unknown keys."""
        with self._changed:
            found = [self._puts.pop(key, None) for key in keys]
            puts = [put for put in found if put is not None]
            for put in puts:
                put.is_sealed = True
            self._changed.wait_for(lambda: not any(put.num_writing for put in puts))
        return found

    def _count_writing(self, pieces: Sequence[tuple[int, _OpenPut, int, memoryview]], change: int) -> None:
        for _, put, _, _ in pieces:
            put.num_writing += change
        self._changed.notify_all()


class _OpenRead:
    def __init__(self, session: ReadSession) -> None:
        self.session = session
        self.lock = threading.Lock()
        self.leased_s = time.monotonic()


class OpenReads:
    """Reads by key. Thread-safe; a key is read by one thread at a time."""

    def __init__(self, client: Store) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._reads: dict[bytes, _OpenRead] = {}

    def start(self, keys: Sequence[bytes]) -> list[MoonpoolError | None]:
        """Find each object and verify its header. Return the error of each."""
        infos = self._client.lookup(keys, reads=True)
        opened = iter(self._client.piece_reads.open_many([info for info in infos if info is not None], None))
        outcomes: list[MoonpoolError | None] = []
        with self._lock:
            for key, info in zip(keys, infos, strict=True):
                found = NotFound("no such object") if info is None else next(opened)
                self._reads.pop(key, None)
                if isinstance(found, ReadSession):
                    self._reads[key] = _OpenRead(found)
                outcomes.append(found if isinstance(found, MoonpoolError) else None)
        return outcomes

    def read(self, items: Sequence[tuple[bytes, Ranges]]) -> list[int | MoonpoolError]:
        """Read ranges of each key. Return by position how many bytes, or the error: InvalidInput for an unknown key or
        a range outside the object, StaleGeneration when the object is gone, and then the key is forgotten.
        """
        self._renew_leases([key for key, _ in items])
        return [self._read_one(key, ranges) for key, ranges in items]

    def end(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._reads.pop(key, None)

    def _read_one(self, key: bytes, ranges: Ranges) -> int | MoonpoolError:
        with self._lock:
            read = self._reads.get(key)
        if read is None:
            return InvalidInput("no read of this key is open")
        with read.lock:
            try:
                self._read_pieces(read.session, ranges)
                read.session.finish()
            except (StaleGeneration, NotFound) as error:
                self.end([key])
                return StaleGeneration(str(error))
            except MoonpoolError as error:
                return error
        return sum(view.nbytes for _, view in ranges)

    def _read_pieces(self, session: ReadSession, ranges: Ranges) -> None:
        """Read whole pieces with one transfer, as ranges of layers mostly are; others one by one."""
        if any(offset < 0 for offset, _ in ranges):
            raise InvalidInput("a range cannot begin below 0")
        sizes = session.fields.sizes
        for some in without_overlaps(ranges):
            whole: list[tuple[ReadSession, int, memoryview]] = []
            for index, parts in cut_ranges(sizes, some):
                view = parts[0][1]
                if len(parts) == 1 and view is not None:
                    whole.append((session, index, view))
                else:
                    session.read_parts(index, parts)
            for error in self._client.piece_reads.read(whole) if whole else ():
                if error is not None:
                    raise error

    def _renew_leases(self, keys: Sequence[bytes]) -> None:
        """Lease again what was leased more than half of its time ago."""
        now_s = time.monotonic()
        with self._lock:
            found = [(key, self._reads[key]) for key in dict.fromkeys(keys) if key in self._reads]
            due = [(key, read) for key, read in found if now_s - read.leased_s > read.session.info.lease_s / 2]
            for _, read in due:
                read.leased_s = now_s
        if due:
            self._client.exist_many([key for key, _ in due])
