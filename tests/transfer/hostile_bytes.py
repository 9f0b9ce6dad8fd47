"""Bytes that a broken or hostile peer might send, from a seed, and how to run them in batches that can be replayed.

MOONPOOL_FUZZ_SEED=7 takes another seed; MOONPOOL_FUZZ_SEED=7:12 runs batch 12 of it alone.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from moonpool.base.checksum import crc32c
from moonpool.base.rpc.protocol import Call
from moonpool.transfer.control import Admit, Attach, Confirm, Describe, Introduce, Notify
from moonpool.transfer.transports.tcp.frames import FrameOp

NBYTES = 64 * 1024
NAMES = (b"seg", b"fenced", b"private", b"gone", b"", b"\xff\xfe", "sëg".encode(), b"n" * 255, b"\0")
NUMBERS = (0, 1, 2, 255, 256, NBYTES - 1, NBYTES, NBYTES + 1, 2**16 - 1, 2**20, 2**24, 2**28, 2**30 - 1, 2**30,
           2**30 + 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - NBYTES, 2**64 - 1)  # fmt: skip


def batches(default_seed: int) -> tuple[int, Iterator[int]]:
    """The seed, and the numbers of the batches to run: without end, or the one that is to be replayed."""
    text = os.environ.get("MOONPOOL_FUZZ_SEED", str(default_seed))
    seed, _, batch = text.partition(":")
    return int(seed), iter([int(batch)] if batch else range(10**9))


@contextmanager
def replayable(seed: int, batch: int) -> Iterator[None]:
    """A failure says how to see it again."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"to run this batch again: MOONPOOL_FUZZ_SEED={seed}:{batch}")
        raise


class Hostile:
    """Everything it makes follows from the random numbers it is given."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def number(self) -> int:
        return self.rng.choice(NUMBERS) if self.rng.random() < 0.7 else self.rng.getrandbits(self.rng.randrange(1, 65))

    def data(self, nbytes: int) -> bytes:
        return self.rng.randbytes(nbytes)

    def name(self) -> bytes:
        return self.rng.choice(NAMES[:2]) if self.rng.random() < 0.8 else self.rng.choice(NAMES)

    def request(self) -> bytes:
        """One request, whole: right in form, with one value or another that is a lie."""
        op = self.rng.choices((FrameOp.READ, FrameOp.WRITE, FrameOp.ASK), (4, 6, 2))[0]
        if op is FrameOp.ASK:
            body = self.call()
            return pack(op, b"", 0, 0, len(body), 0, self.rng.getrandbits(64), body) + body
        nbytes = self.rng.choice((0, 1, 100, self.rng.randrange(4000), self.rng.randrange(300)))
        offset = self.rng.randrange(NBYTES - nbytes) if self.rng.random() < 0.8 else self.number()
        incarnation = 1 if self.rng.random() < 0.9 else self.number()
        generation = self.rng.randrange(50) if self.rng.random() < 0.95 else self.number()
        if op is FrameOp.READ and self.rng.random() < 0.5:
            generation = 0  # expects none
        head = pack(op, self.name(), incarnation, offset, nbytes, generation, self.rng.getrandbits(64))
        return head + (self.data(nbytes) if op is FrameOp.WRITE else b"")

    def call(self) -> bytes:
        name = self.name().decode("utf-8", "replace")
        spans = [(self.number() % 2**63, self.number() % 2**63) for _ in range(self.rng.randrange(3))]
        incarnation = 1 if self.rng.random() < 0.8 else self.number()
        calls: tuple[Callable[[], Call[Any]], ...] = (
            lambda: Describe(name),
            lambda: Introduce(),
            lambda: Notify(name, incarnation, self.data(self.rng.randrange(100))),
            lambda: Admit(name, incarnation, spans, self.rng.randrange(40)),
            lambda: Confirm(name, incarnation, spans, self.rng.randrange(40)),
            lambda: Attach("nixl", name, incarnation, self.data(10)),
        )
        body = msgspec.msgpack.encode(self.rng.choice(calls)())
        return body if self.rng.random() < 0.6 else self.break_call(body)

    def break_call(self, body: bytes) -> bytes:
        kind = self.rng.randrange(4)
        if kind == 0:  # nested without end
            return body + b"\x91" * self.rng.choice((10, 2000, 30_000))
        if kind == 1:  # a string that is no text
            return b"\x92\xa8Describe\xa3" + self.data(3)
        if kind == 2:  # a list or a string that announces what does not come
            return body[: self.rng.randrange(len(body))] + self.rng.choice((b"\xdd", b"\xdb", b"\xc6")) + b"\x7f" * 4
        return self.damage(body)

    def damage(self, frame: bytes) -> bytes:
        """The frame with some of its bytes changed, lost, doubled or put in."""
        changed, rng = bytearray(frame), self.rng
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            at = rng.randrange(len(changed)) if changed else 0
            kind = rng.randrange(7)
            if kind == 0 and changed:
                changed[at] ^= 1 << rng.randrange(8)
            elif kind == 1:  # a number that lies, wherever one may be
                size, layout = rng.choice(((1, "<B"), (2, "<H"), (4, "<I"), (8, "<Q")))
                at = at // size * size
                changed[at : at + size] = struct.pack(layout, self.number() % 2 ** (8 * size))
            elif kind == 2:
                del changed[at:]
            elif kind == 3:
                del changed[at : at + rng.randrange(1, 20)]
            elif kind == 4:
                changed[at:at] = self.data(rng.randrange(1, 40))
            elif kind == 5:
                changed += changed[at : at + 100]
            else:
                changed[rng.randrange(min(48, len(changed) + 1)) :] = self.data(rng.randrange(200))
        return bytes(changed)

    def stream(self, make: Callable[[], bytes], num_frames: int) -> bytes:
        """Frames that keep the stream in step, so that the owner reads on, then some that need not."""
        frames = [make() for _ in range(num_frames)]
        for _ in range(self.rng.randrange(3)):
            at = self.rng.randrange(num_frames // 2, num_frames)
            damaged = self.damage(frames[at])
            frames[at] = damaged if self.rng.random() < 0.5 else seal(damaged)  # by mistake, or on purpose
        if self.rng.random() < 0.1:  # the end of one frame on the beginning of another
            first, second = frames[-1], self.rng.choice(frames)
            frames[-1] = first[: self.rng.randrange(len(first) + 1)] + second[self.rng.randrange(len(second) + 1) :]
        return b"".join(frames)


def pack(
    op: int, name: bytes, incarnation: int, offset: int, nbytes: int, generation: int, id_: int, call: bytes = b""
) -> bytes:
    """A request's head by the book (tcp/frames.py), whatever the values; written anew here, so that the test does not
    trust what it tests.
    """
    numbers = (id_, incarnation, offset, nbytes, generation, crc32c(call if op == FrameOp.ASK else name))
    head = struct.pack("<4sBBHQQQQQI", b"MPTX", 2, op, len(name), *numbers)
    return head + struct.pack("<I", crc32c(head)) + name


def seal(frame: bytes) -> bytes:
    """The request with the head's checksum made right."""
    head = frame[:52]
    return head + struct.pack("<I", crc32c(head)) + frame[56:] if len(frame) >= 56 else frame
