"""Keeps the newest decision records, bounded; finds them by request or by filter, and fills them in. Pure.

Beside each record the store keeps what must not leave the conductor with it: the tenant, and 8 bytes of each of the
prompt's chain keys (fingerprints), packed. A trace exported from them shows which requests shared a prefix. Among a
million blocks, two are mistaken for each other with a probability of 3e-8.

Memory: `capacity` records of at most about 4 KB (16 candidates and names; usually 1 KB), and `max_prints_nbytes` of
fingerprints in total. Beyond that the oldest records lose their fingerprints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moonpool.base.errors import ConfigError, MoonpoolError
from moonpool.conductor.messages import Decision, DecisionRecord, EarlierAttempt, RequestEnded, Route


def open_record(call: Route, wall_s: float) -> DecisionRecord:
    return DecisionRecord(
        request_id=call.request_id,
        routed_at_s=wall_s,
        num_tokens=call.num_tokens,
        max_tokens=call.max_tokens,
        priority=call.priority,
    )


def record_decision(record: DecisionRecord, decision: Decision) -> None:
    record.prefill, record.decode = decision.prefill.name, decision.decode.name
    record.pool_blocks, record.candidates = decision.pool_blocks, decision.candidates
    record.predicted_ttft_s, record.predicted_tbt_s = decision.ttft_s, decision.tbt_s
    record.outcome, record.waited_s = "open", decision.waited_s


def record_refusal(record: DecisionRecord, error: MoonpoolError, waited_s: float) -> None:
    record.outcome, record.reason, record.waited_s = error.code, str(error), waited_s
    record.ended_at_s = record.routed_at_s + waited_s


def record_end(record: DecisionRecord, call: RequestEnded) -> None:
    record.ssd_tokens, record.remote_tokens, record.parts = call.ssd_tokens, call.remote_tokens, call.parts
    record.outcome, record.measured_ttft_s, record.measured_tbt_s = call.outcome, call.ttft_s, call.tbt_s
    record.cached_tokens, record.pool_tokens = call.cached_tokens, call.pool_tokens
    record.output_tokens = call.output_tokens


def as_earlier(record: DecisionRecord, next_at_s: float) -> EarlierAttempt:
    """Return the record as an attempt that was followed by another one, routed at `next_at_s`."""
    return EarlierAttempt(
        routed_at_s=record.routed_at_s,
        ended_at_s=next_at_s if record.ended_at_s is None else record.ended_at_s,
        prefill=record.prefill,
        decode=record.decode,
        outcome="rerouted" if record.outcome == "open" else record.outcome,
        reason=record.reason,
        predicted_ttft_s=record.predicted_ttft_s,
        waited_s=record.waited_s,
        output_tokens=record.output_tokens,
    )


def first_missed(keys: Sequence[bytes], num_tokens: int, cached_tokens: int, block_tokens: int) -> bytes | None:
    """Return the key of the first block that could have been reused and was not. The last token is always computed, so
    a block that ends with it does not count."""
    number = cached_tokens // block_tokens
    return keys[number] if number < len(keys) and (number + 1) * block_tokens < num_tokens else None


PRINT_NBYTES = 8
MAX_EARLIER = 16  # attempts that a record keeps of its request
MAX_CHOICES = 128  # of one client request; the front end allows no more


@dataclass(slots=True, eq=False)
class KeptRecord:
    """`prints`: 8 bytes per full block of the prompt, in order; b"" if they were dropped or never known. `missed`: the
    key of the first block that was not reused, about which the pool can be asked."""

    record: DecisionRecord
    tenant: str | None
    prints: bytes
    missed: bytes | None = None
    began_s: float = 0.0  # when it was routed, on the clock of `now_s`

    def ended(self, now_s: float) -> None:
        """Note the time of its end: that of its beginning and what has passed since, also if the wall clock was set."""
        self.record.ended_at_s = self.record.routed_at_s + max(0.0, now_s - self.began_s)


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """A field that is None matches everything. `worker` is the prefill or the decode worker."""

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
    """Finds a request in O(1). A filter looks at each record once, newest first, and stops at its limit."""

    def __init__(self, capacity: int, max_prints_nbytes: int = 32 << 20) -> None:
        if capacity < 0 or max_prints_nbytes < 0:
            raise ConfigError("the number of records is 0 (none is kept) or more", param="num_records")
        self._capacity = capacity
        self._max_prints_nbytes = max_prints_nbytes
        self._kept: OrderedDict[str, KeptRecord] = OrderedDict()
        self._printed: OrderedDict[str, None] = OrderedDict()  # the records with fingerprints, oldest first
        self.prints_nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def num_attempts(self, request_id: str) -> int:
        """Return how often the request was routed; 0 if nothing is known of it."""
        kept = self._kept.get(request_id)
        return 0 if kept is None else kept.record.attempt

    def add(
        self, record: DecisionRecord, *, tenant: str | None = None, keys: Sequence[bytes] = (), now_s: float = 0.0
    ) -> None:
        """Add a record in place of an earlier one of the same request, whose attempts it keeps."""
        if not self._capacity:
            return
        earlier = self._remove(record.request_id)
        if earlier is not None:
            record.attempt = earlier.record.attempt + 1
            before = as_earlier(earlier.record, record.routed_at_s)
            record.earlier = (*earlier.record.earlier, before)[-MAX_EARLIER:]
        kept = KeptRecord(record, tenant, b"".join([key[:PRINT_NBYTES] for key in keys]), began_s=now_s)
        self._kept[record.request_id] = kept
        if kept.prints:
            self._printed[record.request_id] = None
            self.prints_nbytes += len(kept.prints)
        if len(self._kept) > self._capacity:
            self._remove(next(iter(self._kept)))
        while self.prints_nbytes > self._max_prints_nbytes:
            self._drop_prints(next(iter(self._printed)))

    def get(self, request_id: str) -> DecisionRecord | None:
        kept = self._kept.get(request_id)
        return None if kept is None else kept.record

    def kept(self, request_id: str) -> KeptRecord | None:
        return self._kept.get(request_id)

    def of_client(self, request_id: str) -> list[KeptRecord]:
        """Return the records of a client request's choices, ID-0, ID-1, ..., or of the one request with that id."""
        own = self._kept.get(request_id)
        if own is not None:
            return [own]
        choices = (self._kept.get(f"{request_id}-{number}") for number in range(MAX_CHOICES))
        return [kept for kept in choices if kept is not None]

    def find(self, wanted: RecordFilter, limit: int) -> list[DecisionRecord]:
        """Return the newest records that match, at most `limit`, newest last."""
        found: list[DecisionRecord] = []
        for kept in reversed(self._kept.values()):
            if len(found) >= limit:
                break
            if wanted.matches(kept):
                found.append(kept.record)
        return found[::-1]

    def select(self, wanted: RecordFilter) -> Iterator[KeptRecord]:
        """Return all records that match now, oldest first; the store may change during the iteration."""
        return iter([kept for kept in self._kept.values() if wanted.matches(kept)])

    def _remove(self, request_id: str) -> KeptRecord | None:
        self._drop_prints(request_id)
        return self._kept.pop(request_id, None)

    def _drop_prints(self, request_id: str) -> None:
        if request_id in self._printed:
            del self._printed[request_id]
            kept = self._kept[request_id]
            self.prints_nbytes -= len(kept.prints)
            kept.prints = b""
