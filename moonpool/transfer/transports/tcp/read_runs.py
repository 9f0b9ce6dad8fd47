"""The owner's answers to many small READs that have come together: each is checked and taken as connection.py does it
for one, and all go out in one piece.

The fence is asked for all of them before the first byte is taken, and again after the last: so the verdict on each is
known before anything is sent.
"""

from __future__ import annotations

import numpy as np

from moonpool.transfer.memory.fence import Fence
from moonpool.transfer.memory.segment import Segment
from moonpool.transfer.transports.tcp.frame_columns import ReadRun
from moonpool.transfer.transports.tcp.frames import VERDICT_NBYTES, ReadVerdict, pack_response, pack_verdict

GATHER_NBYTES = 32 * 1024  # data of a READ below this is copied rather than sent from where it lies


def answer_run(run: ReadRun, segment: Segment) -> tuple[bytes, int]:
    """Return the answers to the first READs of the run, and to how many of them. The next one is refused, or of another
    kind.
    """
    if not segment.in_memory:
        return b"", 0
    memory, fence = segment.borrow()
    run = run.first(_count_usual(run, segment.nbytes))
    if fence is None or not run.request_ids:
        return b"", 0
    carries = fence.carries(run.offsets, run.sizes, run.generations)
    if not carries.all():
        run = run.first(int(carries.argmin()))
    return _taken(run, memory, fence), len(run.request_ids)


def _count_usual(run: ReadRun, segment_nbytes: int) -> int:
    """Return how many READs at the start expect a generation, are small and inside the segment."""
    is_usual = (run.generations > 0) & (run.sizes > 0) & (run.sizes < GATHER_NBYTES)
    is_usual &= run.offsets + run.sizes <= segment_nbytes
    return len(is_usual) if is_usual.all() else int(is_usual.argmin())


def _taken(run: ReadRun, memory: memoryview, fence: Fence) -> bytes:
    """Return the answers with the data and its verdicts."""
    parts: list[bytes | memoryview] = []
    for number, offset, nbytes in zip(run.request_ids, run.offsets.tolist(), run.sizes.tolist(), strict=True):
        parts.append(pack_response(number, nbytes))
        parts.append(memory[offset : offset + nbytes])
        parts.append(pack_verdict(number, ReadVerdict.SAME))
    answers = b"".join(parts)  # takes the bytes
    carries = fence.carries(run.offsets, run.sizes, run.generations)
    return answers if carries.all() else _with_stale(run, answers, np.flatnonzero(~carries).tolist())


def _with_stale(run: ReadRun, answers: bytes, stale: list[int]) -> bytes:
    """Return the answers with other verdicts on some READs, which are given by position."""
    changed = bytearray(answers)
    ends = np.cumsum(run.sizes + (len(pack_response(1, 0)) + VERDICT_NBYTES)).tolist()
    for at in stale:
        changed[ends[at] - VERDICT_NBYTES : ends[at]] = pack_verdict(run.request_ids[at], ReadVerdict.STALE)
    return bytes(changed)
