"""Attention of a mixed batch over paged KV: prefill chunks and decode rows of any lengths in one step.

A step's queries are split into groups that are computed together: a long chunk alone, short chunks and decode rows with
others of similar shape, padded to the longest. A group's rows, pages and masks are the same in every layer, so they are
computed once per step (`plan_attention`) and each layer does tensor work only (`attend`). All KV is read through the
block tables, including KV that the step itself has just written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from moonpool.engine.kv_tensor import KvMemory
from moonpool.engine.sequence import pages_for

# Chunks up to this many tokens are padded and grouped; a longer one alone keeps the cores busy.
_SHORT_CHUNK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Queries of one sequence: rows first_row.. of the step, at positions start.. of the sequence."""

    first_row: int
    start: int
    length: int
    pages: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Spans computed together. Tensors are on the step's device."""

    num_spans: int
    num_queries: int  # of the longest span
    num_keys: int  # of the longest span
    page_index: torch.Tensor
    mask: torch.Tensor | None  # additive, [spans, 1, queries, keys]; None: no mask, or causal
    is_causal: bool
    rows: torch.Tensor | None  # step rows of all queries, padded [spans * queries]; None: all rows in order
    valid: torch.Tensor | None  # indices of those that are not padding; None: all


def plan_attention(
    spans: Sequence[QuerySpan], kv: KvMemory, *, num_rows: int, dtype: torch.dtype, device: torch.device
) -> list[AttentionGroup]:
    """Return groups that cover all spans, each span in one group. `num_rows` is the number of rows of the step."""
    return [
        _plan_group(members, kv, num_rows=num_rows, dtype=dtype, device=device)
        for members in _grouped(spans, kv.layout.block_tokens)
    ]


def attend(query: torch.Tensor, groups: Sequence[AttentionGroup], kv: KvMemory, layer: int) -> torch.Tensor:
    """Return the attention of query [rows, heads, dim] over the pages: [rows, heads * dim]."""
    if len(groups) == 1 and groups[0].rows is None:
        return _attend_group(query, groups[0], kv, layer).flatten(1)
    out = torch.empty_like(query)
    for group in groups:
        assert group.rows is not None, "only a group of all rows has no row list"
        part, rows = _attend_group(query.index_select(0, group.rows), group, kv, layer), group.rows
        if group.valid is not None:
            part, rows = part.index_select(0, group.valid), rows.index_select(0, group.valid)
        out.index_copy_(0, rows, part)
    return out.flatten(1)


def _attend_group(query: torch.Tensor, group: AttentionGroup, kv: KvMemory, layer: int) -> torch.Tensor:
    """Query and result are [spans * queries, heads, dim]."""
    k, v = kv.read(layer, group.page_index, group.num_spans)
    k, v = k[:, :, : group.num_keys], v[:, :, : group.num_keys]  # [spans, kv heads, keys, dim]
    if group.num_spans == 1 and group.num_queries > 1:
        return _attend_one(query, k[0], v[0], group)
    return _attend_many(query, k, v, group)


def _attend_one(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: AttentionGroup) -> torch.Tensor:
    """One span: each KV head is a batch entry, and the query heads that share it are its heads, with stride 0."""
    tokens, heads, dim = query.shape
    kv_heads = k.shape[0]
    q = query.view(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3)  # [kv heads, shared, tokens, dim]
    k, v = (x[:, None].expand(-1, heads // kv_heads, -1, -1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask, is_causal=group.is_causal)
    return out.permute(2, 0, 1, 3).reshape(tokens, heads, dim)


def _attend_many(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: AttentionGroup) -> torch.Tensor:
    """Many short spans: the query heads that share a KV head become further query rows of it."""
    _, heads, dim = query.shape
    spans, queries, kv_heads = group.num_spans, group.num_queries, k.shape[1]
    shared = heads // kv_heads
    q = query.view(spans, queries, kv_heads, shared, dim).permute(0, 2, 3, 1, 4)
    mask = group.mask
    if mask is not None and queries > 1:
        mask = mask.repeat(1, 1, shared, 1)  # rows are ordered [shared, queries]
    out = F.scaled_dot_product_attention(q.reshape(spans, kv_heads, -1, dim), k, v, attn_mask=mask)
    out = out.view(spans, kv_heads, shared, queries, dim).permute(0, 3, 1, 2, 4)
    return out.reshape(spans * queries, heads, dim)


def _grouped(spans: Iterable[QuerySpan], block_tokens: int) -> list[list[QuerySpan]]:
    """Group spans of similar shape, so that padding at most doubles the work. A long chunk is a group alone."""
    groups: dict[tuple[int, ...], list[QuerySpan]] = defaultdict(list)
    for span in spans:
        if span.length > _SHORT_CHUNK_TOKENS:
            groups[(span.first_row, -1, -1)].append(span)
        else:
            table = pages_for(span.end, block_tokens)
            groups[(-1, (span.length - 1).bit_length(), (table - 1).bit_length())].append(span)
    return list(groups.values())


def _plan_group(
    spans: Sequence[QuerySpan], kv: KvMemory, *, num_rows: int, dtype: torch.dtype, device: torch.device
) -> AttentionGroup:
    lengths = np.array([span.length for span in spans])
    starts = np.array([span.start for span in spans])
    first_rows = np.array([span.first_row for span in spans])
    num_queries, num_keys = int(lengths.max()), int((starts + lengths).max())
    if device.type != "cpu":
        # A GPU chooses a kernel for each new shape (about 50 ms); with whole pages the shape rarely changes.
        num_keys = pages_for(num_keys, kv.layout.block_tokens) * kv.layout.block_tokens
    offsets = np.arange(num_queries)
    rows = (first_rows[:, None] + np.minimum(offsets, lengths[:, None] - 1)).reshape(-1)
    in_order = len(rows) == num_rows and bool((rows == np.arange(num_rows)).all())
    is_causal = len(spans) == 1 and num_queries > 1 and spans[0].start == 0
    padded = bool((lengths != num_queries).any())
    return AttentionGroup(
        num_spans=len(spans),
        num_queries=num_queries,
        num_keys=num_keys,
        page_index=torch.from_numpy(kv.page_index(_tables(spans, num_keys, kv.layout.block_tokens))).to(device),
        mask=None if is_causal else _mask(starts, offsets, num_keys, dtype, device),
        is_causal=is_causal,
        rows=None if in_order else torch.from_numpy(rows).to(device),
        valid=_valid(lengths, offsets, device) if padded else None,
    )


def _tables(spans: Sequence[QuerySpan], num_keys: int, block_tokens: int) -> np.ndarray:
    """Return block tables of equal width, padded with a page of the same span; the mask hides the padding."""
    width = pages_for(num_keys, block_tokens)
    tables = np.empty((len(spans), width), dtype=np.int64)
    for table, span in zip(tables, spans, strict=True):
        used = pages_for(span.end, block_tokens)
        table[:used] = span.pages[:used]
        table[used:] = span.pages[0]
    return tables


def _mask(
    starts: np.ndarray, offsets: np.ndarray, num_keys: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Return the mask by which a query sees keys up to its own position; None if every query sees every key."""
    positions = starts[:, None] + offsets  # [spans, queries]; padding queries see too much and are dropped later
    if bool((positions >= num_keys - 1).all()):
        return None
    visible = torch.from_numpy(positions[:, None, :, None] >= np.arange(num_keys)).to(device)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~visible, float("-inf"))


def _valid(lengths: np.ndarray, offsets: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.flatnonzero(offsets < lengths[:, None])).to(device)
