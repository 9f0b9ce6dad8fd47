"""The answers to a run of READs, received straight into the caller's memory.

As long as every READ succeeds, it is known in advance what comes: head, data and, of a READ that expects a generation,
verdict. So the kernel puts the data where it belongs and all heads and verdicts side by side, where one comparison
checks them. After each receive, what is here is compared; at the first answer that is another one, the bytes from there
on are given back to the inbox, and the pipeline takes the answers one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from moonpool.base.clock import Deadline
from moonpool.transfer.memory.buffers import cut
from moonpool.transfer.transports.sockets import TimedSocket, after, receive_first
from moonpool.transfer.transports.tcp.frames import (
    RESPONSE_NBYTES,
    VERDICT_NBYTES,
    ReadVerdict,
    pack_response,
    pack_verdict,
)


class AnswerRun:
    """The answers to READs of these sizes into these views, one view each; the first has the number `first_number`.
    All of them expect a generation, or none does.
    """

    def __init__(self, first_number: int, sizes: Sequence[int], views: Sequence[memoryview], expecting: bool) -> None:
        self._verdict_nbytes = VERDICT_NBYTES if expecting else 0
        self._frames_nbytes = RESPONSE_NBYTES + self._verdict_nbytes  # of one answer
        self._frames = bytearray(len(sizes) * self._frames_nbytes)
        self._expected, self._ends = _successes(first_number, tuple(sizes), expecting)
        self._room = self._interleaved(memoryview(self._frames), views)

    def receive(self, sock: TimedSocket, deadline: Deadline) -> tuple[int, bytes]:
        """Return how many answers are here and are successes, and the bytes that have come behind them: b"" when all
        are.
        """
        rest, num_here = self._room, 0
        while rest:
            count = receive_first(sock, rest, deadline)
            num_here, rest = num_here + count, after(rest, count)
            num_right = self._count_right(num_here)
            if num_right is not None:
                start = self._ends[num_right - 1] if num_right else 0
                return num_right, b"".join(cut(self._room, start, num_here - start))
        return len(self._ends), b""

    def _count_right(self, num_here: int) -> int | None:
        """Return how many answers are successes if another one has begun to arrive; None when all may be."""
        num_whole = bisect_right(self._ends, num_here)
        start = self._ends[num_whole - 1] if num_whole else 0
        known = num_whole * self._frames_nbytes + (RESPONSE_NBYTES if num_here - start >= RESPONSE_NBYTES else 0)
        if self._frames[:known] == self._expected[:known]:
            return None
        wrong = next(at for at in range(known) if self._frames[at] != self._expected[at])
        return wrong // self._frames_nbytes

    def _interleaved(self, frames: memoryview, views: Sequence[memoryview]) -> list[memoryview]:
        """Return the memory for what comes: head, view and verdict in turn; a verdict and the next head as one."""
        room = [frames[:RESPONSE_NBYTES]]
        for end, view in enumerate(views, 1):
            room.append(view)
            at = end * self._frames_nbytes
            room.append(frames[at - self._verdict_nbytes : at + RESPONSE_NBYTES])
        return room


@lru_cache(maxsize=64)  # batches of objects of one size ask for the same again and again
def _successes(first_number: int, sizes: tuple[int, ...], expecting: bool) -> tuple[bytes, list[int]]:
    """Return the heads and verdicts of all answers, and how many bytes have come at the end of each."""
    frames: list[bytes] = []
    for number, nbytes in enumerate(sizes, first_number):
        frames.append(pack_response(number, nbytes))
        if expecting:
            frames.append(pack_verdict(number, ReadVerdict.SAME))
    frames_nbytes = RESPONSE_NBYTES + (VERDICT_NBYTES if expecting else 0)
    return b"".join(frames), list(accumulate([nbytes + frames_nbytes for nbytes in sizes]))
