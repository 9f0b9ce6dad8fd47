"""Cuts a batch of transfers into slices. Pure: numbers in, numbers out.

The slices of a request cover it exactly, in order and without overlap; requests keep their order. A request of
no bytes still has one slice, so that its checks are made and it is reported done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Measured over two lanes of loopback tcp: 256 KiB slices move 0.4 GB/s, 1 MiB ones 0.8 to 1.7, 4 MiB ones 1.1 to 1.7.
# The smallest of the good sizes shares a batch most evenly over the lanes.
DEFAULT_SLICE_NBYTES = 1024 * 1024


class Slice(NamedTuple):
    """Bytes start .. start + nbytes of one request of the batch."""

    request: int
    start: int
    nbytes: int


def cut_batch(request_nbytes: Sequence[int], slice_nbytes: int = DEFAULT_SLICE_NBYTES) -> list[Slice]:
    """All slices of a batch whose requests have these sizes, none larger than `slice_nbytes`."""
    assert slice_nbytes > 0
    return [
        Slice(request, start, min(slice_nbytes, nbytes - start))
        for request, nbytes in enumerate(request_nbytes)
        for start in range(0, max(nbytes, 1), slice_nbytes)
    ]


def take_run(slices: Sequence[Slice], start: int, slice_nbytes: int = DEFAULT_SLICE_NBYTES) -> int:
    """End of the run that one thread should take from `start` on: at least one slice, together no larger than
    one full slice. Small transfers are thus handed out by the dozen, large ones one by one.
    """
    end, nbytes = start, 0
    while end < len(slices) and (end == start or nbytes + slices[end].nbytes <= slice_nbytes):
        nbytes += slices[end].nbytes
        end += 1
    return end
