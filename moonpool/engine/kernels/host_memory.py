"""Small arrays between page-locked main memory and the GPU, by a kernel instead of the GPU's copy engine.

A copy engine serves copies in order: the few kilobytes of a step's input would wait for the gigabytes of KV that
another stream moves. A kernel reads and writes page-locked memory by its address and waits for nothing.
"""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _fetch(address, target, COUNT, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = address.to(tl.pointer_type(tl.int32))
    tl.store(target + at, tl.load(source + at, mask=at < COUNT, other=0), mask=at < COUNT)


@triton.jit
def _deliver(source, address, COUNT, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = address.to(tl.pointer_type(tl.int32))
    tl.store(target + at, tl.load(source + at, mask=at < COUNT, other=0), mask=at < COUNT)


def fetch(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `source`, page-locked, to `target` on the GPU, of the same size: a whole number of 4-byte words each. The
    caller does not change or free `source` before the current stream has come this far.
    """
    words = target.view(-1).view(torch.int32)
    assert source.nbytes == target.nbytes, "the same size"
    _fetch[(triton.cdiv(words.numel(), _BLOCK),)](source.data_ptr(), words, words.numel(), BLOCK=_BLOCK, num_warps=4)


def deliver(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy `source` on the GPU to `target`, page-locked, of the same size. The host may read the bytes when an event
    that was recorded behind this call is over.
    """
    words = source.view(-1).view(torch.int32)
    assert source.nbytes == target.nbytes, "the same size"
    _deliver[(triton.cdiv(words.numel(), _BLOCK),)](words, target.data_ptr(), words.numel(), BLOCK=_BLOCK, num_warps=4)
