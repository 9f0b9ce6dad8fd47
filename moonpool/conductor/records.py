"""The last decisions and what became of them: a ring of bounded length. Pure."""

from __future__ import annotations

from moonpool.conductor.messages import DecisionRecord


class RecordRing:
    """Keeps the `capacity` newest records, found by request id while they are kept."""

    def __init__(self, capacity: int) -> None:
        assert capacity > 0
        self._capacity = capacity
        self._records: dict[str, DecisionRecord] = {}

    def add(self, record: DecisionRecord) -> None:
        """Replaces an earlier record of the same request and counts the attempts."""
        earlier = self._records.pop(record.request_id, None)
        if earlier is not None:
            record.attempt = earlier.attempt + 1
        self._records[record.request_id] = record
        if len(self._records) > self._capacity:
            del self._records[next(iter(self._records))]

    def get(self, request_id: str) -> DecisionRecord | None:
        return self._records.get(request_id)

    def newest(self, limit: int) -> list[DecisionRecord]:
        """At most `limit`, newest last."""
        return list(self._records.values())[-limit:] if limit > 0 else []
