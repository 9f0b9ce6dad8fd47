"""Counts a step's tokens, applies penalties and bars tokens on the GPU, as engine/sampler.py does on the host.

The counts are those of engine/penalties.py, a row per slot: how often the output has each token, inverted where the
prompt has it too. They are reached by an address that the GPU holds, because they are allocated when the first penalty
comes, and a CUDA graph that was recorded before has to find them.
"""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moonpool.engine.kernels.sampling import DRAW_FIELDS

_FIRST_FIELD = DRAW_FIELDS - 3  # of a draw: repetition, presence and frequency penalty
_HUGE = torch.finfo(torch.float32).max
_BLOCK = 2048


@triton.jit
def _penalize(
    logits, tokens, slots, due, draws, address, VOCAB, stride, ROW, FIELDS: tl.constexpr, FIRST: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, HUGE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64) - 1
    if slot >= 0:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < VOCAB
        if WIDE:
            counts = tl.load(address).to(tl.pointer_type(tl.int32)) + slot * ROW + at
        else:
            counts = tl.load(address).to(tl.pointer_type(tl.int16)) + slot * ROW + at
        stored = tl.load(counts, mask=inside, other=0)
        count = stored.to(tl.int32)
        is_newest = (at == tl.load(tokens + row)) & (tl.load(due + row) != 0)
        count = tl.where(is_newest, tl.where(count < 0, count - 1, count + 1), count)
        tl.store(counts, count.to(stored.dtype), mask=inside & is_newest)
        times = tl.where(count < 0, -1 - count, count)
        fields = draws + row * FIELDS + FIRST
        zeros = tl.zeros((BLOCK,), tl.float32)
        repetition = zeros + tl.load(fields).to(tl.float32)
        presence, frequency = tl.load(fields + 1).to(tl.float32), tl.load(fields + 2).to(tl.float32)
        x = tl.load(logits + row * stride + at, mask=inside, other=0.0)
        is_finite = tl.abs(x) <= HUGE  # others stay as they are: excluded tokens, and NaN, which has to be seen
        y = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        y = tl.minimum(tl.maximum(y, -HUGE), HUGE)
        y = tl.where(is_finite & (count != 0), y, x)
        z = y - (frequency * times.to(tl.float32) + presence)
        z = tl.minimum(tl.maximum(z, -HUGE), HUGE)
        z = tl.where(is_finite & (times > 0), z, y)
        tl.store(logits + row * stride + at, z, mask=inside & (count != 0))


def penalize(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    slots: torch.Tensor,
    due: torch.Tensor,
    draws: torch.Tensor,
    address: torch.Tensor,
    *,
    row_counts: int,
    wide: bool,
) -> None:
    """Count the token of each row that is `due`, then penalize the row's logits, in place.

    logits [rows, vocab] float32; tokens, slots, due [rows] int32; a row's slot is given plus 1, 0: it has no penalties.
    draws [rows, DRAW_FIELDS] float64. address [1] int64 is that of the counts, `row_counts` per slot, int32 if `wide`,
    otherwise int16.
    """
    rows, vocab = logits.shape
    # Without fusion each operation rounds as on the host.
    _penalize[(rows, triton.cdiv(vocab, _BLOCK))](
        logits, tokens, slots, due, draws, address, vocab, logits.stride(0), row_counts, FIELDS=DRAW_FIELDS,
        FIRST=_FIRST_FIELD, WIDE=wide, BLOCK=_BLOCK, HUGE=_HUGE, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _bar(logits, barred, numbers, hidden, stride, WIDTH: tl.constexpr, HUGE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    some = at < tl.load(numbers + row)
    tokens = tl.load(barred + row * WIDTH + at, mask=some, other=0)
    x = tl.load(logits + row * stride + tokens, mask=some, other=float("-inf"))
    possible = some & (tl.abs(x) <= HUGE)
    tl.store(logits + row * stride + tokens, float("-inf"), mask=possible)
    tl.store(hidden + row, tl.max(possible.to(tl.int32), 0))


def bar_tokens(logits: torch.Tensor, barred: torch.Tensor, numbers: torch.Tensor, hidden: torch.Tensor) -> None:
    """Exclude the first `numbers` tokens of each row of `barred`, in place. NaN and infinity stay as they are.

    logits [rows, vocab] float32; barred [rows, a power of 2] int32, tokens of the vocabulary; numbers [rows] int32.
    hidden [rows] int32 becomes 1 where a token was barred that could have been sampled, otherwise 0.
    """
    _bar[(logits.shape[0],)](
        logits, barred, numbers, hidden, logits.stride(0), WIDTH=barred.shape[1], HUGE=_HUGE, num_warps=1
    )
