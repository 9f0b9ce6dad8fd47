"""The newest decision records, bounded, found by request and filtered by what became of them. Pure.

Beside each record stands what must not leave the conductor with it: the tenant, and 8 bytes of each of the prompt's
chain keys (fingerprints), packed. A trace can be exported from them that says which requests shared a prefix. Among a
million blocks two are mistaken for each other with a chance of 3e-8.

Memory: `capacity` records of at most about 4 KB (16 candidates and names; 1 KB usually), and `max_prints_nbytes` of
fingerprints in all. When these run out the oldest records lose theirs, and only these.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moonpool.base.errors import ConfigError
from moonpool.conductor.messages import DecisionRecord

PRINT_NBYTES = 8
MAX_CHOICES = 128  # of one client request; the front end allows no more


@dataclass(slots=True, eq=False)
class KeptRecord:
    """`prints`: 8 bytes for each full block of the prompt, in order; b"" when they were given up or never known.
    `missed`: the key of the first block that was not reused, to ask the pool about."""

    record: DecisionRecord
    tenant: str | None
    prints: bytes
    missed: bytes | None = None


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """What is None does not matter. `worker`: prefill or decode."""

    outcome: str | None = None
    tenant: str | None = None
    worker: str | None = None

    def matches(self, kept: KeptRecord) -> bool:
        record = kept.record
        return (
            (self.outcome is None or record.outcome == self.outcome)
            and (self.tenant is None or kept.tenant == self.tenant)
            and (self.worker is None or self.worker in (record.prefill, record.decode))
        )


class RecordStore:
    """By request id in O(1); a filter looks at each record once, newest first, and stops when it has enough."""

    def __init__(self, capacity: int, max_prints_nbytes: int = 32 << 20) -> None:
        if capacity < 0 or max_prints_nbytes < 0:
            raise ConfigError("the number of records is 0 (none is kept) or more", param="num_records")
        self._capacity = capacity
        self._max_prints_nbytes = max_prints_nbytes
        self._kept: OrderedDict[str, KeptRecord] = OrderedDict()
        self._printed: OrderedDict[str, None] = OrderedDict()  # those that have fingerprints, oldest first
        self.prints_nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, record: DecisionRecord, *, tenant: str | None = None, keys: Sequence[bytes] = ()) -> None:
        """In place of an earlier record of the same request, whose attempts are counted on."""
        if not self._capacity:
            return
        earlier = self._forget(record.request_id)
        if earlier is not None:
            record.attempt = earlier.record.attempt + 1
        kept = KeptRecord(record, tenant, b"".join([key[:PRINT_NBYTES] for key in keys]))
        self._kept[record.request_id] = kept
        if kept.prints:
            self._printed[record.request_id] = None
            self.prints_nbytes += len(kept.prints)
        if len(self._kept) > self._capacity:
            self._forget(next(iter(self._kept)))
        while self.prints_nbytes > self._max_prints_nbytes:
            self._drop_prints(next(iter(self._printed)))

    def get(self, request_id: str) -> DecisionRecord | None:
        kept = self._kept.get(request_id)
        return None if kept is None else kept.record

    def kept(self, request_id: str) -> KeptRecord | None:
        return self._kept.get(request_id)

    def of_client(self, request_id: str) -> list[KeptRecord]:
        """Of a client's request: those of its choices, ID-0, ID-1, ...; or of the one request that has that id."""
        own = self._kept.get(request_id)
        if own is not None:
            return [own]
        choices = (self._kept.get(f"{request_id}-{number}") for number in range(MAX_CHOICES))
        return [kept for kept in choices if kept is not None]

    def find(self, wanted: RecordFilter, limit: int = 100) -> list[DecisionRecord]:
        """The newest that match, at most `limit`, newest last."""
        found: list[DecisionRecord] = []
        for kept in reversed(self._kept.values()):
            if len(found) >= limit:
                break
            if wanted.matches(kept):
                found.append(kept.record)
        return found[::-1]

    def select(self, wanted: RecordFilter) -> Iterator[KeptRecord]:
        """All that match, oldest first, as they are now; the store may change meanwhile."""
        return iter([kept for kept in self._kept.values() if wanted.matches(kept)])

    def _forget(self, request_id: str) -> KeptRecord | None:
        self._drop_prints(request_id)
        return self._kept.pop(request_id, None)

    def _drop_prints(self, request_id: str) -> None:
        if request_id in self._printed:
            del self._printed[request_id]
            kept = self._kept[request_id]
            self.prints_nbytes -= len(kept.prints)
            kept.prints = b""
