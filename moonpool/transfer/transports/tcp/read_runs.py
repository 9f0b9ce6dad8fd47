"""The owner's answers to many READs that have come together: small ones in a row are checked and taken as connection.py
does it for one, and go out in one piece.

The fence is asked for all that expect a generation before the first byte is taken, and again after the last: so the
verdict on each is known before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moonpool.transfer.memory.fence import Fence
from moonpool.transfer.memory.segment import Borrowed
from moonpool.transfer.transports.tcp.frame_columns import ReadRun
from moonpool.transfer.transports.tcp.frames import VERDICT_NBYTES, ReadVerdict, pack_response, pack_verdict

GATHER_NBYTES = 32 * 1024  # data of a READ below this is copied rather than sent from where it lies


def cut_run(run: ReadRun, borrowed: Borrowed | None) -> Iterator[tuple[ReadRun, bool]]:
    """Yield the READs in order, cut where the way to answer changes, and whether a part can be answered together:
    small READs inside the memory, all of which expect the generations in place, or none. Without memory none can.
    """
    if borrowed is None:
        yield run, False
        return
    expecting = run.generations > 0
    together = _together(run, borrowed, expecting)
    if together.all() and expecting.all() == expecting.any():  # one part: mostly so, and cutting costs 10 us
        yield run, True
        return
    changes = (together[1:] != together[:-1]) | (expecting[1:] != expecting[:-1])
    for start, end in pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(together)]):
        yield run.part(start, end), bool(together[start])


def _together(run: ReadRun, borrowed: Borrowed, expecting: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which READs are small, inside the memory, and expect what is in place or nothing."""
    memory, fence = borrowed
    small = (run.sizes > 0) & (run.sizes < GATHER_NBYTES) & (run.offsets + run.sizes <= memory.nbytes)
    if fence is None or not expecting.any():
        return small & ~expecting
    asked = small & expecting
    if asked.all():
        return fence.carries(run.offsets, run.sizes, run.generations)
    small[asked] = fence.carries(run.offsets[asked], run.sizes[asked], run.generations[asked])
    return small


def answer_together(run: ReadRun, borrowed: Borrowed) -> bytes:
    """Return the answers to READs of which cut_run() has said that they can be answered together."""
    fence = borrowed.fence if run.generations[0] else None
    memory = borrowed.memory
    parts: list[bytes | memoryview] = []
    for number, offset, nbytes in zip(run.request_ids, run.offsets.tolist(), run.sizes.tolist(), strict=True):
        parts.append(pack_response(number, nbytes))
        parts.append(memory[offset : offset + nbytes])
        if fence is not None:
            parts.append(pack_verdict(number, ReadVerdict.SAME))
    answers = b"".join(parts)  # takes the bytes
    return answers if fence is None else _with_stale(run, answers, fence)


def _with_stale(run: ReadRun, answers: bytes, fence: Fence) -> bytes:
    """Return the answers with other verdicts on those READs whose space does not carry their generation any more."""
    carries = fence.carries(run.offsets, run.sizes, run.generations)
    if carries.all():
        return answers
    changed = bytearray(answers)
    ends = np.cumsum(run.sizes + (len(pack_response(1, 0)) + VERDICT_NBYTES)).tolist()
    for at in np.flatnonzero(~carries).tolist():
        changed[ends[at] - VERDICT_NBYTES : ends[at]] = pack_verdict(run.request_ids[at], ReadVerdict.STALE)
    return bytes(changed)
