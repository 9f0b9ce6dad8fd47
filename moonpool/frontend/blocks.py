"""What lies where in the pool, for people who may see all tenants: GET /v1/blocks, /v1/blocks/{key}, and its verify.

A block's key says nothing about its text, but it tells whether two prompts begin alike; so a tenant's key is refused.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from moonpool.base.errors import InvalidInput, NotFound, Unauthorized, Unavailable
from moonpool.base.rpc import AsyncClient
from moonpool.conductor.messages import WorkerRef
from moonpool.frontend.replies import json_response
from moonpool.frontend.request_handler import RequestHandler
from moonpool.frontend.tenants import Reader
from moonpool.frontend.workers import STATUS_TIMEOUT_S
from moonpool.store.messages import ListBlocks, Lookup, Placement, SegmentInfo, Segments, Stats, StoredBlock, Tier, Why
from moonpool.worker.messages import VerifyObject

MAX_BLOCKS = 10_000
_PAGE = 2048
_VERIFY_TIMEOUT_S = 30.0
_FIELDS = ("key", "parent", "nbytes", "segments", "uses", "rank", "is_kept")


class SegmentPlace(msgspec.Struct, frozen=True):
    name: str
    node: str
    tier: str


class BlocksReply(msgspec.Struct, frozen=True, kw_only=True):
    """`blocks` are lists with one value per name in `fields`; `parent` is a position in `blocks`, -1 for none, and
    `segments` are positions in `segments`. `next` is the cursor of the blocks after these; None: there are none."""

    total: int
    next: int | None
    segments: list[SegmentPlace]
    fields: tuple[str, ...]
    blocks: list[tuple[str, int, int, list[int], int, float | None, bool]]


class BlockReply(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    why: str  # a sentence
    replicas: list[SegmentPlace]


def as_reply(blocks: list[StoredBlock], infos: list[SegmentInfo], total: int, next_cursor: int | None) -> BlocksReply:
    """Return the blocks in JSON's terms: keys in hexadecimal, parents and segments by position. A block whose parent is
    in another answer begins a tree here."""
    places = [_place(info) for info in infos]
    number = {place.name: at for at, place in enumerate(places)}
    row = {block.key: at for at, block in enumerate(blocks)}
    rows = [
        (
            block.key.hex(),
            row.get(block.parent, -1),
            block.nbytes,
            [number[name] for name in block.segments if name in number],
            block.uses,
            block.rank,
            block.is_kept,
        )
        for block in blocks
    ]
    return BlocksReply(total=total, next=next_cursor, segments=places, fields=_FIELDS, blocks=rows)


def _place(info: SegmentInfo) -> SegmentPlace:
    return SegmentPlace(info.descriptor.name, info.node, "dram" if info.tier & Tier.DRAM else "ssd")


def add_blocks(router: APIRouter, handler: RequestHandler) -> None:
    """Add the routes to the router, which sets `request.state.reader`."""

    @router.get("/blocks")
    async def list_blocks(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_BLOCKS)] = MAX_BLOCKS,
        cursor: Annotated[int, Query(ge=0)] = 0,
    ) -> Response:
        """Objects of the pool with their prefixes, replicas, uses and rank for eviction, from `cursor` on: 0, or the
        `next` of an earlier answer. Needs an admin key."""
        master = await _master(request, handler)
        blocks: list[StoredBlock] = []
        at: int | None = cursor
        while at is not None and len(blocks) < limit:
            call = ListBlocks(cursor=at, limit=min(_PAGE, limit - len(blocks)))
            page = await master.call(call, timeout_s=STATUS_TIMEOUT_S)
            blocks += page.blocks
            at = page.cursor
        stats, infos = await asyncio.gather(master.call(Stats()), master.call(Segments()))
        return json_response(as_reply(blocks, infos, stats.num_objects, at))

    @router.get("/blocks/{key}")
    async def explain_block(request: Request, key: str) -> Response:
        """What happened to a block, and where its replicas are. Needs an admin key."""
        master, wanted = await _master(request, handler), _key(key)
        why = await master.call(Why(key=wanted), timeout_s=STATUS_TIMEOUT_S)
        (found,) = await master.call(Lookup(keys=[wanted], lease=False, reads=False), timeout_s=STATUS_TIMEOUT_S)
        placements: tuple[Placement, ...] = () if found is None else found.replicas
        places = {info.descriptor.name: _place(info) for info in await master.call(Segments())}
        replicas = [places[each.segment] for each in placements if each.segment in places]
        return json_response(BlockReply(key=key, why=f"{why[:1].upper()}{why[1:]}.", replicas=replicas))

    @router.post("/blocks/{key}/verify")
    async def verify_block(request: Request, key: str) -> Response:
        """Let a worker read the block and check every byte. Needs an admin key."""
        await _master(request, handler)
        wanted = _key(key)
        workers = (await handler.cluster.status()).workers
        if not workers:
            raise Unavailable("no worker is registered that could read the block")
        info = workers[0].info
        worker = await handler.connections.worker(WorkerRef(info.name, info.address, info.incarnation))
        nbytes = await worker.call(VerifyObject(key=wanted), timeout_s=_VERIFY_TIMEOUT_S)
        sentence = f"{info.name} read {nbytes:,} bytes; every checksum is right."
        return json_response({"key": key, "nbytes": nbytes, "sentence": sentence})


async def _master(request: Request, handler: RequestHandler) -> AsyncClient:
    """Return a client of the master. Raise Unauthorized without an admin key, NotFound without a pool."""
    reader: Reader = request.state.reader
    if reader.tenant is not None:
        raise Unauthorized("blocks of the pool belong to all tenants; an admin key shows them")
    master = await handler.connections.master()
    if master is None:
        raise NotFound("this service has no pool")
    return master


def _key(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidInput("the key of a block is written in hexadecimal", param="key") from None
