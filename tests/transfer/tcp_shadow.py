"""What an owner should make of a stream of bytes, by the book: a slow reading of tcp/frames.py's docstring that shares
no code with the server, except for what calls (ASK) mean and for the fence.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from moonpool.base.checksum import crc32c
from moonpool.base.descriptor import SegmentDescriptor
from moonpool.base.errors import MoonpoolError
from moonpool.transfer.control import ControlHandler
from moonpool.transfer.memory.fence import Fence
from moonpool.transfer.memory.segment import Segment

MARGIN = 64 * 1024
GRANULE = 512
_HEAD = struct.Struct("<4sBBHQQQQQII")


class Answer(NamedTuple):
    request_id: int
    ok: bool
    data: bytes  # empty for an error, whose text is the owner's own
    verdict: bytes = b""  # behind the data of a READ that expects a generation


@dataclass
class Memories:
    """Two segments that are served, cut out of the middle of larger memory, and two that are not."""

    nbytes: int
    control: ControlHandler = field(default_factory=lambda: ControlHandler(incarnation=5))

    def __post_init__(self) -> None:
        names = ("seg", "fenced", "private", "gone")
        self.wholes = {name: bytearray(bytes([at + 1]) * (self.nbytes + 2 * MARGIN)) for at, name in enumerate(names)}
        self.segments = {name: self._segment(name) for name in names}
        for name in ("seg", "fenced", "gone"):
            self.control.serve(self.segments[name])
            self.control.publish(
                SegmentDescriptor(name=name, nbytes=self.nbytes, incarnation=1, host="h", endpoints=("tcp:h:1",))
            )
        self.control.withdraw("gone")

    def _segment(self, name: str) -> Segment:
        middle = memoryview(self.wholes[name])[MARGIN:-MARGIN]
        return Segment.over(name, middle, granule_nbytes=GRANULE if name == "fenced" else None, incarnation=1)


class Shadow:
    """Does to its own memories what the owner should do to his."""

    def __init__(self, nbytes: int) -> None:
        self.memories = Memories(nbytes)
        self.num_frames = 0
        self.torn: tuple[str, int, bytes] | None = None  # a write cut short: its bytes may be there or not

    def run(self, stream: bytes) -> list[Answer]:
        """The answers to one connection, in order, the last of which may be the refusal of the connection."""
        self.torn = None
        answers: list[Answer] = []
        at = 0
        while len(stream) - at >= _HEAD.size:
            self.num_frames += 1
            (magic, version, op, name_nbytes, id_, incarnation, offset, nbytes, generation, follows, checksum) = (
                _HEAD.unpack_from(stream, at)
            )
            intact = crc32c(stream[at : at + 52]) == checksum
            at += _HEAD.size
            limit = 64 * 1024 if op == 3 else 2**30
            named = 1 <= name_nbytes <= 255 or (op == 3 and name_nbytes == 0)
            fits = nbytes <= limit and offset + nbytes < 2**64
            if (magic, version) != (b"MPTX", 2) or not intact or op not in (1, 2, 3) or not named or not fits:
                return [*answers, Answer(0, False, b"")]
            if len(stream) - at < name_nbytes:
                return answers
            if name_nbytes and crc32c(stream[at : at + name_nbytes]) != follows:
                return [*answers, Answer(0, False, b"")]
            try:
                name = stream[at : at + name_nbytes].decode()
            except UnicodeDecodeError:
                return [*answers, Answer(0, False, b"")]
            at += name_nbytes
            data = stream[at : at + nbytes] if op != 1 else b""
            at += len(data)
            torn = op != 1 and len(data) < nbytes
            if op == 3:
                if torn:
                    return answers
                if crc32c(data) != follows:
                    return [*answers, Answer(0, False, b"")]
                answers.append(self._ask(id_, data))
                continue
            ok = self._write_or_check(op, name, incarnation, offset, nbytes, generation, data)
            if torn:
                return answers
            found = self.memories.wholes[name][MARGIN + offset : MARGIN + offset + nbytes] if ok and op == 1 else b""
            has_verdict = ok and op == 1 and generation != 0
            answers.append(Answer(id_, ok, bytes(found), verdict(id_) if has_verdict else b""))
        if len(stream) - at >= 5 and stream[at : at + 5] != b"MPTX\x02":
            answers.append(Answer(0, False, b""))
        return answers

    def _write_or_check(
        self, op: int, name: str, incarnation: int, offset: int, nbytes: int, generation: int, data: bytes
    ) -> bool:
        if name not in ("seg", "fenced") or incarnation != 1 or offset + nbytes > self.memories.nbytes:
            return False
        fence = self.memories.segments[name].fence
        if op == 1:
            return generation == 0 or (fence is not None and _carries(fence, offset, nbytes, generation))
        if fence is not None:
            try:
                fence.admit(offset, nbytes, generation)
            except MoonpoolError:
                return False
        if len(data) < nbytes:
            self.torn = (name, MARGIN + offset, data)
        else:
            self.memories.wholes[name][MARGIN + offset : MARGIN + offset + nbytes] = data
        return True

    def _ask(self, id_: int, body: bytes) -> Answer:
        try:
            return Answer(id_, True, self.memories.control.answer_body(body))
        except MoonpoolError:
            return Answer(id_, False, b"")

    def agree(self, real: Memories) -> None:
        """AssertionError unless the owner's memory is as this one's, margins and all; of a torn write each byte may be
        the old one or the new one.
        """
        if self.torn is not None:
            name, start, data = self.torn
            end = start + len(data)
            found, old = real.wholes[name][start:end], self.memories.wholes[name][start:end]
            assert all(byte in pair for byte, *pair in zip(found, old, data, strict=True)), "a torn write wrote else"
            self.memories.wholes[name][start:end] = found
        for name, whole in real.wholes.items():
            assert whole == self.memories.wholes[name], f"segment {name!r} or its surroundings changed"


def verdict(id_: int) -> bytes:
    """That the space is still of the generation expected."""
    head = struct.pack("<IQ", 0, id_)
    return head + struct.pack("<I", crc32c(head))


def _carries(fence: Fence, offset: int, nbytes: int, generation: int) -> bool:
    end = offset + nbytes
    return all(fence.generation_at(at) == generation for at in range(offset - offset % GRANULE, end, GRANULE) if nbytes)
