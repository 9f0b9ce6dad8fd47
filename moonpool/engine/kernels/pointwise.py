"""The small operations of a layer, each as one kernel: add and normalize, rotate and write KV, gate.

Sums are computed in float32 and rounded once to the tensors' type.
"""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moonpool.engine.kv_memory import KvLayout


@triton.jit
def _add_norm(x, delta, weight, normed, eps, HIDDEN: tl.constexpr, PADDED: tl.constexpr, HAS_DELTA: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    ok = at < HIDDEN
    value = tl.load(x + row * HIDDEN + at, mask=ok, other=0.0)
    if HAS_DELTA:
        added = value.to(tl.float32) + tl.load(delta + row * HIDDEN + at, mask=ok, other=0.0).to(tl.float32)
        value = added.to(x.dtype.element_ty)
        tl.store(x + row * HIDDEN + at, value, mask=ok)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
    result = wide * scale * tl.load(weight + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(normed + row * HIDDEN + at, result.to(x.dtype.element_ty), mask=ok)


def add_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `delta` to x [rows, hidden] in place, if there is one, and return its RMS norm."""
    rows, hidden = x.shape
    assert x.is_contiguous(), "rows lie together"
    assert delta is None or delta.is_contiguous(), "rows lie together"
    normed, padded = torch.empty_like(x), triton.next_power_of_2(hidden)
    _add_norm[(rows,)](
        x, x if delta is None else delta, weight, normed, eps, HIDDEN=hidden, PADDED=padded,
        HAS_DELTA=delta is not None, num_warps=min(16, max(1, padded // 512)),
    )  # fmt: skip
    return normed


@triton.jit
def _rotate_write(
    qkv, q_norm, k_norm, cos, sin, query, key, kv, slots, eps, layer_offset, page_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, PER_PROGRAM: tl.constexpr, HAS_NORM: tl.constexpr, KEEP_KEY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    i = tl.arange(0, PADDED_HALF)
    dim_ok = (i < HALF)[None, :]
    is_query, is_key = head < HEADS, (head >= HEADS) & (head < HEADS + KV_HEADS)
    ok = (head < HEADS + 2 * KV_HEADS)[:, None] & dim_ok
    source = qkv + row * ((HEADS + 2 * KV_HEADS) * 2 * HALF) + head[:, None] * (2 * HALF) + i[None, :]
    first = tl.load(source, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=ok, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        ones = tl.full((PER_PROGRAM, PADDED_HALF), 1.0, tl.float32)
        turned = (is_query | is_key)[:, None]
        scale = tl.where(turned, scale, 1.0)
        weight1 = tl.where(is_key[:, None], tl.load(k_norm + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :], ones)
        weight1 = tl.where(is_query[:, None], tl.load(q_norm + i, mask=i < HALF, other=0.0).to(tl.float32), weight1)
        weight2 = tl.where(
            is_key[:, None], tl.load(k_norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :], ones
        )
        weight2 = tl.where(
            is_query[:, None], tl.load(q_norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32), weight2
        )
        # Rounded as a separate norm would be: the angles then turn the same numbers.
        first = (first * scale * weight1).to(qkv.dtype.element_ty).to(tl.float32)
        second = (second * scale * weight2).to(qkv.dtype.element_ty).to(tl.float32)
    is_turned = (is_query | is_key)[:, None]
    c = tl.where(is_turned, tl.load(cos + row * HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :], 1.0)
    s = tl.where(is_turned, tl.load(sin + row * HALF + i, mask=i < HALF, other=0.0).to(tl.float32)[None, :], 0.0)
    new1 = (first * c - second * s).to(qkv.dtype.element_ty)
    new2 = (second * c + first * s).to(qkv.dtype.element_ty)
    to_query = query + (row * HEADS + head)[:, None] * (2 * HALF) + i[None, :]
    tl.store(to_query, new1, mask=is_query[:, None] & dim_ok)
    tl.store(to_query + HALF, new2, mask=is_query[:, None] & dim_ok)
    slot = tl.load(slots + row).to(tl.int64)  # page * block_tokens + place in the page; below 0: a padding row
    which, kv_head = tl.where(is_key, 0, 1), tl.where(is_key, head - HEADS, head - HEADS - KV_HEADS)
    to_page = (slot // BLOCK_TOKENS) * page_stride + layer_offset + (slot % BLOCK_TOKENS) * (2 * HALF)
    to_page = kv + to_page + ((which * KV_HEADS + kv_head) * (BLOCK_TOKENS * 2 * HALF))[:, None] + i[None, :]
    written = ((head >= HEADS) & (slot + tl.zeros_like(head) >= 0))[:, None] & ok
    tl.store(to_page, new1.to(kv.dtype.element_ty), mask=written)
    tl.store(to_page + HALF, new2.to(kv.dtype.element_ty), mask=written)
    if KEEP_KEY:
        to_key = key + (row * KV_HEADS + head - HEADS)[:, None] * (2 * HALF) + i[None, :]
        tl.store(to_key, new1, mask=is_key[:, None] & dim_ok)
        tl.store(to_key + HALF, new2, mask=is_key[:, None] & dim_ok)


def rotate_and_write(
    qkv: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    kv: torch.Tensor,
    layout: KvLayout,
    layer: int,
    slots: torch.Tensor,
    *,
    num_heads: int,
    eps: float,
    keep_key: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Normalize (if the model does), rotate and write K and V of qkv [rows, all heads * dim] to the pages.

    `slots` is page * block_tokens + place in the page of each row, below 0 for a row that is not written. Return the
    queries [rows, heads, dim] and, if `keep_key`, the keys [rows, kv heads, dim].
    """
    rows, dim, kv_heads = qkv.shape[0], layout.head_dim, layout.num_kv_heads
    query = torch.empty(rows, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    key = torch.empty(rows, kv_heads, dim, dtype=qkv.dtype, device=qkv.device) if keep_key else None
    plane, per_program = kv_heads * layout.block_tokens * dim, 8
    q_norm, k_norm = norms if norms is not None else (qkv, qkv)
    _rotate_write[(rows, triton.cdiv(num_heads + 2 * kv_heads, per_program))](
        qkv, q_norm, k_norm, cos_sin[0], cos_sin[1], query, query if key is None else key, kv, slots, eps,
        layer * 2 * plane, layout.num_layers * 2 * plane, HEADS=num_heads, KV_HEADS=kv_heads, HALF=dim // 2,
        PADDED_HALF=triton.next_power_of_2(dim // 2), BLOCK_TOKENS=layout.block_tokens, PER_PROGRAM=per_program,
        HAS_NORM=norms is not None, KEEP_KEY=keep_key, num_warps=2,
    )  # fmt: skip
    return query, key


@triton.jit
def _silu_mul(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = at < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + at, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=ok)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of [rows, gate | up]."""
    rows, both = gate_up.shape
    out = torch.empty(rows, both // 2, dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, triton.next_power_of_2(both // 2))
    _silu_mul[(rows, triton.cdiv(both // 2, block))](gate_up, out, SIZE=both // 2, BLOCK=block, num_warps=4)
    return out
