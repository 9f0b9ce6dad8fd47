"""Attention over paged KV, for decode rows and prompt chunks alike.

A tile is up to `tile_tokens` consecutive tokens of one sequence. All query heads that share a KV head are rows of one
program, so each key and value is loaded once for them. A program computes one tile, one KV head and one of
`num_splits` parts of the keys; `merge_splits` joins the parts. With one part the result is final.

Keys are read through the block table. A query sees the keys up to its own position; what lies behind the sequence's end
in its last page never counts, whatever its bytes are.
"""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moonpool.engine.kv_memory import KvLayout

_KEYS_PER_STEP = 64
_LOG2_E = 1.4426950408889634


@triton.jit
def _attend(
    query, kv, out, partial, stats, tile_rows, tile_ends, tile_counts, tile_tables, tables,
    layer_offset, page_stride, table_width, scale,
    NUM_SPLITS: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, KV_HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end, count = tl.load(tile_ends + tile), tl.load(tile_counts + tile)
    table = tables + tl.load(tile_tables + tile) * table_width
    row, dim = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    token, dim_ok = row // SHARED, dim < DIM
    row_ok = token < count
    position = end - count + token
    at = (tl.load(tile_rows + tile) + token).to(tl.int64) * (KV_HEADS * SHARED) + head * SHARED + row % SHARED
    q = tl.load(query + at[:, None] * DIM + dim[None, :], mask=row_ok[:, None] & dim_ok[None, :], other=0.0)
    best = tl.full((ROWS,), -1.0e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    num_steps = tl.cdiv(end, KEYS)
    per_split = tl.cdiv(num_steps, NUM_SPLITS)
    for step in range(split * per_split, tl.minimum((split + 1) * per_split, num_steps)):
        key = step * KEYS + tl.arange(0, KEYS)
        key_ok = key < end
        if BLOCK_TOKENS % KEYS == 0:  # the keys of a step lie in one page
            page = tl.load(table + step * KEYS // BLOCK_TOKENS).to(tl.int64)
            first = page * page_stride + layer_offset + (head * BLOCK_TOKENS + step * KEYS % BLOCK_TOKENS) * DIM
            where = first + tl.arange(0, KEYS)[:, None] * DIM + dim[None, :]
        else:
            pages = tl.load(table + key // BLOCK_TOKENS, mask=key_ok, other=0).to(tl.int64)
            first = pages * page_stride + layer_offset + (head * BLOCK_TOKENS + key % BLOCK_TOKENS) * DIM
            where = first[:, None] + dim[None, :]
        # Bytes behind the end may be NaN, and 0 * NaN would reach the sums: they are not loaded.
        loaded = key_ok[:, None] & dim_ok[None, :]
        k = tl.load(kv + where, mask=loaded, other=0.0).to(q.dtype)  # pages may be kept in 8 bits
        v = tl.load(kv + KV_HEADS * BLOCK_TOKENS * DIM + where, mask=loaded, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        seen = key[None, :] <= position[:, None]
        new_best = tl.maximum(best, tl.max(tl.where(seen, scores, -1.0e30), 1))
        weight = tl.where(seen, tl.exp2(scores - new_best[:, None]), 0.0)
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        best = new_best
    stored = row_ok[:, None] & dim_ok[None, :]
    if NUM_SPLITS == 1:
        result = acc / tl.maximum(total, 1.0e-30)[:, None]
        tl.store(out + at[:, None] * DIM + dim[None, :], result.to(out.dtype.element_ty), mask=stored)
    else:
        part = (at * NUM_SPLITS + split)[:, None] * DIM + dim[None, :]
        tl.store(partial + part, acc, mask=stored)
        tl.store(stats + (at * NUM_SPLITS + split) * 2, best, mask=row_ok)
        tl.store(stats + (at * NUM_SPLITS + split) * 2 + 1, total, mask=row_ok)


@triton.jit
def _merge(
    partial, stats, out, tile_rows, tile_counts, NUM_SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    tile, token = tl.program_id(0), tl.program_id(1) // HEADS
    at = (tl.load(tile_rows + tile) + token).to(tl.int64) * HEADS + tl.program_id(1) % HEADS
    split, dim = tl.arange(0, PADDED_SPLITS), tl.arange(0, PADDED_DIM)
    count = tl.load(tile_counts + tile)
    ok = (split < NUM_SPLITS) & (token + tl.zeros_like(split) < count)
    dim_ok = (dim < DIM) & (token + tl.zeros_like(dim) < count)
    best = tl.load(stats + (at * NUM_SPLITS + split) * 2, mask=ok, other=-1.0e30)
    total = tl.load(stats + (at * NUM_SPLITS + split) * 2 + 1, mask=ok, other=0.0)
    factor = tl.exp2(best - tl.max(best, 0))
    where = (at * NUM_SPLITS + split)[:, None] * DIM + dim[None, :]
    parts = tl.load(partial + where, mask=ok[:, None] & dim_ok[None, :], other=0.0)
    merged = tl.sum(parts * factor[:, None], 0) / tl.maximum(tl.sum(total * factor, 0), 1.0e-30)
    tl.store(out + at * DIM + dim, merged.to(out.dtype.element_ty), mask=dim_ok)


class Tiles(NamedTuple):
    """int32 tensors on the device, one entry per tile: its first query row, the position behind its last token, its
    number of tokens (at most `tile_tokens`), and its row in `tables` [sequences, width].
    """

    rows: torch.Tensor
    ends: torch.Tensor
    counts: torch.Tensor
    table_rows: torch.Tensor
    tables: torch.Tensor
    tile_tokens: int
    num_splits: int


def attend_tiles(
    query: torch.Tensor, kv: torch.Tensor, layout: KvLayout, layer: int, tiles: Tiles, out: torch.Tensor
) -> None:
    """Write the attention of query [rows, heads, dim] over the pages of one layer to the tiles' rows of `out`, which
    has the same shape. A tile with `ends` 0 is padding, and its rows become 0.
    """
    rows, heads, dim = query.shape
    kv_heads, shared, splits = layout.num_kv_heads, heads // layout.num_kv_heads, tiles.num_splits
    padded_dim = max(16, triton.next_power_of_2(dim))
    tile_rows = max(16, triton.next_power_of_2(tiles.tile_tokens * shared))
    partial, stats = out, out  # not used with one split
    if splits > 1:
        partial = torch.empty(rows, heads, splits, dim, dtype=torch.float32, device=query.device)
        stats = torch.empty(rows, heads, splits, 2, dtype=torch.float32, device=query.device)
    plane = kv_heads * layout.block_tokens * dim
    _attend[(tiles.rows.shape[0], kv_heads, splits)](
        query, kv, out, partial, stats, tiles.rows, tiles.ends, tiles.counts, tiles.table_rows, tiles.tables,
        layer * 2 * plane, layout.num_layers * 2 * plane, tiles.tables.stride(0), dim**-0.5 * _LOG2_E,
        NUM_SPLITS=splits, SHARED=shared, ROWS=tile_rows, KEYS=_KEYS_PER_STEP, DIM=dim, PADDED_DIM=padded_dim,
        BLOCK_TOKENS=layout.block_tokens, KV_HEADS=kv_heads,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        # Few warps read a decode's keys fastest: 4.3 TB/s on an H200 with 2, 3.5 with 4. Parts are short: 4.
        num_warps=2 if tile_rows == 16 and splits == 1 else 4, num_stages=2 if query.dtype == torch.float32 else 3,
    )  # fmt: skip
    if splits > 1:
        _merge[(tiles.rows.shape[0], tiles.tile_tokens * heads)](
            partial, stats, out, tiles.rows, tiles.counts, NUM_SPLITS=splits,
            PADDED_SPLITS=triton.next_power_of_2(splits), HEADS=heads, DIM=dim, PADDED_DIM=padded_dim,
            num_warps=1 if splits * padded_dim <= 1024 else 4,
        )  # fmt: skip


@triton.jit
def _join(
    past, chunk, past_lse, chunk_lse, out, past_token, past_head, chunk_token, chunk_head, TOKENS, HEADS: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, DIM)
    ok = token < TOKENS
    lse = head * TOKENS + token
    share = tl.sigmoid(tl.load(past_lse + lse, mask=ok, other=0.0) - tl.load(chunk_lse + lse, mask=ok, other=0.0))[
        :, None
    ]
    at = token.to(tl.int64)[:, None]
    a = tl.load(past + at * past_token + head * past_head + dim[None, :], mask=ok[:, None]).to(tl.float32)
    b = tl.load(chunk + at * chunk_token + head * chunk_head + dim[None, :], mask=ok[:, None]).to(tl.float32)
    joined = (b + (a - b) * share).to(out.dtype.element_ty)
    tl.store(out + at * (HEADS * DIM) + head * DIM + dim[None, :], joined, mask=ok[:, None])


def join_parts(
    past: torch.Tensor, past_lse: torch.Tensor, chunk: torch.Tensor, chunk_lse: torch.Tensor
) -> torch.Tensor:
    """Join the attention of the same queries over two sets of keys, each [heads, tokens, dim] with its log-sum-exp
    [heads, tokens]. Return [tokens, heads, dim]. `dim` is a power of 2.
    """
    heads, tokens, dim = past.shape
    out = torch.empty(tokens, heads, dim, dtype=past.dtype, device=past.device)
    assert past.stride(2) == chunk.stride(2) == 1, "the numbers of a head lie together"
    _join[(triton.cdiv(tokens, 32), heads)](
        past, chunk, past_lse.contiguous(), chunk_lse.contiguous(), out, past.stride(1), past.stride(0),
        chunk.stride(1), chunk.stride(0), tokens, HEADS=heads, DIM=dim, BLOCK=32, num_warps=4,
    )  # fmt: skip
    return out
