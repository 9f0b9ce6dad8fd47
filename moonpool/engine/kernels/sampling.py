"""Draws tokens on the GPU as engine/sampler.py does on the host: temperature, min_p, top_k, top_p, then inverse CDF in
vocabulary order with the number that the host computed from seed and position.

One program draws for one row. top_k and top_p need no sorting: the least weight that they keep is found by narrowing
down its bit pattern, 16 candidates per pass over the row; positive floats are ordered as their bit patterns are.
Sums are float64. Near a filter's border a token may fall on the other side than on the host, where sums are added in
another order; so it may between two devices anyway, because their logits differ.
"""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Uniform number, temperature (0: no draw), top_k (0: none), top_p, min_p; penalties: repetition, presence, frequency.
DRAW_FIELDS = 8
_ONE_BITS = 0x3F800000


@triton.jit
def _least_kept(
    weights, above, VOCAB, limit, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
    ONE_BITS: tl.constexpr,
):  # fmt: skip
    """Return the least weight w, at least `above`, so that the weights greater than w number, or weigh, less than
    `limit`."""
    way = tl.arange(0, WAYS)
    low, high = above.to(tl.int32, bitcast=True).to(tl.int64), tl.full((), ONE_BITS, tl.int64)
    for _ in range(9):  # 16**9 is more than there are floats up to 1
        points = low + (high - low) * way // WAYS
        floats = points.to(tl.int32).to(tl.float32, bitcast=True)
        found = tl.zeros((WAYS,), tl.float64)
        for first in range(0, VOCAB, BLOCK):
            at = first + tl.arange(0, BLOCK)
            w = tl.load(weights + at, mask=at < VOCAB, other=0.0)
            is_above = (w[None, :] > floats[:, None]) & (w >= above)[None, :]
            if BY_COUNT:
                found += tl.sum(tl.where(is_above, 1.0, 0.0), 1).to(tl.float64)
            else:
                found += tl.sum(tl.where(is_above, w[None, :], 0.0), 1).to(tl.float64)
        first_ok = tl.min(tl.where(found < limit, way, WAYS), 0)
        at_first = tl.sum(tl.where(way == first_ok, points, 0), 0)
        before = tl.sum(tl.where(way == first_ok - 1, points, 0), 0)
        high = tl.where(first_ok < WAYS, at_first, high)
        low = tl.where(first_ok > 0, before + 1, low)
        low = tl.minimum(low, high)
    return high.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _sum_of(weights, VOCAB, least, BLOCK: tl.constexpr):
    """Return the sum and the number of the weights greater than `least`."""
    total = tl.zeros((), tl.float64)
    count = tl.zeros((), tl.float64)
    for first in range(0, VOCAB, BLOCK):
        at = first + tl.arange(0, BLOCK)
        w = tl.load(weights + at, mask=at < VOCAB, other=0.0)
        total += tl.sum(tl.where(w > least, w, 0.0).to(tl.float64), 0)
        count += tl.sum(tl.where(w > least, 1.0, 0.0), 0).to(tl.float64)
    return total, count


@triton.jit
def _draw(
    logits, all_weights, draws, best, VOCAB, stride, FIELDS: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr,
    ONE_BITS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    u, temperature = tl.load(draws + row * FIELDS), tl.load(draws + row * FIELDS + 1)
    top_k, top_p = tl.load(draws + row * FIELDS + 2), tl.load(draws + row * FIELDS + 3)
    min_p = tl.load(draws + row * FIELDS + 4)
    likeliest = tl.load(best + row)
    if (temperature > 0) & (likeliest >= 0):
        weights = all_weights + row * VOCAB
        top = tl.load(logits + row * stride + likeliest)
        for first in range(0, VOCAB, BLOCK):
            at = first + tl.arange(0, BLOCK)
            x = tl.load(logits + row * stride + at, mask=at < VOCAB, other=float("-inf"))
            w = tl.exp((x - top) / temperature.to(tl.float32))
            w = tl.where(w.to(tl.float64) < min_p, 0.0, w)
            tl.store(weights + at, w, mask=at < VOCAB)
        tl.debug_barrier()  # other threads of the program read what this one wrote
        least = tl.zeros((), tl.float32)
        if top_k > 0:
            least = _least_kept(weights, least, VOCAB, top_k, True, BLOCK, WAYS, ONE_BITS)
        if top_p < 1:
            mass, count = _sum_of(weights, VOCAB, least, BLOCK)
            if top_k > 0:  # of the tokens that tie with the last one, as many as top_k keeps
                mass += tl.maximum(top_k - count, 0.0) * least.to(tl.float64)
            least = _least_kept(weights, least, VOCAB, mass * top_p, False, BLOCK, WAYS, ONE_BITS)
        below = tl.maximum(least.to(tl.int32, bitcast=True) - 1, 0).to(tl.float32, bitcast=True)
        total, _count = _sum_of(weights, VOCAB, below, BLOCK)
        target = u * total
        passed = tl.zeros((), tl.float64)
        picked = tl.full((), VOCAB, tl.int32)
        for first in range(0, VOCAB, BLOCK):
            at = first + tl.arange(0, BLOCK)
            w = tl.load(weights + at, mask=at < VOCAB, other=0.0)
            w = tl.where(w > below, w, 0.0).to(tl.float64)
            reached = tl.cumsum(w, 0) + passed
            picked = tl.minimum(picked, tl.min(tl.where((reached > target) & (w > 0), at, VOCAB), 0))
            passed += tl.sum(w, 0)
        tl.store(best + row, tl.where(picked < VOCAB, picked, likeliest))


def draw_tokens(logits: torch.Tensor, draws: torch.Tensor, best: torch.Tensor) -> None:
    """Replace the most likely token of each row that draws, in place.

    logits [rows, vocab] float32; draws [rows, DRAW_FIELDS] float64; best [rows] int32, below 0 where a row has no
    finite maximum.
    """
    rows, vocab = logits.shape
    weights = torch.empty(rows, vocab, dtype=torch.float32, device=logits.device)
    _draw[(rows,)](
        logits, weights, draws, best, vocab, logits.stride(0), FIELDS=DRAW_FIELDS, BLOCK=2048, WAYS=16,
        ONE_BITS=_ONE_BITS, num_warps=16,
    )  # fmt: skip
