"""Answers the calls about decision records: a shell around records/."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec

from moonpool.base.keys import object_key
from moonpool.base.rpc import RpcPeer
from moonpool.conductor.messages import (
    DecisionRecord,
    ExplainedRecord,
    ExplainRequest,
    ExportTrace,
    RecordRow,
    RecordRows,
    Records,
)
from moonpool.conductor.pool_feed import PoolFeed
from moonpool.conductor.records.explain import explain
from moonpool.conductor.records.export import ExportConfig, TraceExport
from moonpool.conductor.records.store import KeptRecord, RecordFilter
from moonpool.conductor.state import ConductorState

_CHUNK_NBYTES = 1 << 16


def _without_layers(record: DecisionRecord) -> DecisionRecord:
    """Return the record without the times of single layers: a list of a thousand is read every two seconds."""
    parts = record.parts
    if parts is None or not parts.pull_layers_s:
        return record
    return msgspec.structs.replace(record, parts=msgspec.structs.replace(parts, pull_layers_s=()))


class RecordKeeper:
    """Answers calls about decision records: finds, explains and exports them. Without a `feed` there is no pool to ask
    why a block was not there."""

    def __init__(self, state: ConductorState, feed: PoolFeed | None) -> None:
        self._state = state
        self._feed = feed

    def find(self, call: Records, peer: RpcPeer) -> list[DecisionRecord]:
        wanted = RecordFilter(outcome=call.outcome, tenant=call.tenant, worker=call.worker)
        return [_without_layers(each) for each in self._state.records.find(wanted, call.limit)]

    def rows(self, call: RecordRows, peer: RpcPeer) -> list[RecordRow]:
        encode = msgspec.json.Encoder().encode
        return [RecordRow(each.routed_at_s, encode(each)) for each in self.find(call.wanted, peer)]

    async def explain(self, call: ExplainRequest, peer: RpcPeer) -> list[ExplainedRecord]:
        wanted = RecordFilter(tenant=call.tenant)
        found = [kept for kept in self._state.records.of_client(call.request_id) if wanted.matches(kept)]
        return [await self._explained(kept) for kept in found]

    async def _explained(self, kept: KeptRecord) -> ExplainedRecord:
        answer = None
        if kept.missed is not None and self._feed is not None:
            answer = await self._feed.why(object_key(kept.missed))
        return ExplainedRecord(kept.record, tuple(explain(kept.record, self._state.block_tokens, answer)))

    async def export(self, call: ExportTrace, peer: RpcPeer) -> AsyncIterator[bytes]:
        """Raise ConfigError if the pool's blocks cannot be regrouped to that size."""
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
                await asyncio.sleep(0)  # let other calls run
        if chunk:
            yield bytes(chunk)
