"""Answers questions about decision records: finds, explains, writes them out. Only explaining asks the pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from moonpool.base.keys import object_key
from moonpool.conductor.messages import DecisionRecord, ExplainedRecord, ExplainRequest, ExportTrace, Records
from moonpool.conductor.pool_feed import PoolFeed
from moonpool.conductor.records.explain import explain
from moonpool.conductor.records.export import ExportConfig, TraceExport
from moonpool.conductor.records.store import KeptRecord, RecordFilter
from moonpool.conductor.state import ConductorState

_CHUNK_NBYTES = 1 << 16


class RecordKeeper:
    """`feed` None: there is no pool to ask why a block was not there."""

    def __init__(self, state: ConductorState, feed: PoolFeed | None) -> None:
        self._state = state
        self._feed = feed

    def find(self, call: Records) -> list[DecisionRecord]:
        wanted = RecordFilter(outcome=call.outcome, tenant=call.tenant, worker=call.worker)
        return self._state.records.find(wanted, call.limit)

    async def explain(self, call: ExplainRequest) -> list[ExplainedRecord]:
        wanted = RecordFilter(tenant=call.tenant)
        found = [kept for kept in self._state.records.of_client(call.request_id) if wanted.matches(kept)]
        return [await self._explained(kept) for kept in found]

    async def _explained(self, kept: KeptRecord) -> ExplainedRecord:
        says = None
        if kept.missed is not None and self._feed is not None:
            says = await self._feed.why(object_key(kept.missed))
        return ExplainedRecord(kept.record, tuple(explain(kept.record, self._state.block_tokens, says)))

    async def export(self, call: ExportTrace) -> AsyncIterator[bytes]:
        """ConfigError when our blocks cannot be regrouped to that size."""
        config = ExportConfig(self._state.block_tokens, call.trace_block_tokens)
        export, encoder, chunk = TraceExport(config), msgspec.json.Encoder(), bytearray()
        for kept in self._state.records.select(RecordFilter(tenant=call.tenant)):
            line = export.line(kept)
            if line is None:
                continue
            chunk += encoder.encode(line) + b"\n"
            if len(chunk) >= _CHUNK_NBYTES:
                yield bytes(chunk)
                chunk.clear()
                await asyncio.sleep(0)  # others are to be decided upon meanwhile
        if chunk:
            yield bytes(chunk)
